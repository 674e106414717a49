"""Tables and progress bars by `rich`. The only module that imports it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from .._stream import Progress


class RichOutput:
    """Text for a terminal. Whatever comes from a file is taken as text, not as markup."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    @contextmanager
    def progress(self, title: str) -> Generator[Progress | None]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(title, total=None)

            def show(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            yield show
