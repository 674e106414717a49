"""Tables and progress bars by `rich`, which is imported here alone, and only when there is something to draw."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from .._stream import Progress


class RichOutput:
    """Text for a terminal. Whatever comes from a file is taken as text, not as markup."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415

        self._console = Console(highlight=False)

    def line(self, text: str) -> None:
        from rich.text import Text  # noqa: PLC0415

        self._console.print(Text(text), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    @contextmanager
    def progress(self, title: str) -> Generator[Progress | None]:
        from rich import progress  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(title, total=None)

            def show(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            yield show
