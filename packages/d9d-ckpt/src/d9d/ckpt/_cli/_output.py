"""Where commands write: plain text, or tables and progress bars where there is a terminal and `rich`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from .._stream import Progress


class Output(Protocol):
    """What commands write to."""

    def line(self, text: str) -> None:
        """Writes a line, or several."""
        ...

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """Writes a table; the columns in `right` are aligned to the right."""
        ...

    @contextmanager
    def progress(self, title: str) -> Generator[Progress | None]:
        """A callback that shows how far a job is, on stderr; None where nobody looks."""
        ...


class PlainOutput:
    """Text for pipes, files and terminals without `rich`."""

    def line(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        lines = [columns, *rows]
        widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
        for line in lines:
            cells = [
                cell.rjust(width) if column in right else cell.ljust(width)
                for cell, width, column in zip(line, widths, columns)
            ]
            self.line("  ".join(cells).rstrip())

    @contextmanager
    def progress(self, title: str) -> Generator[Progress | None]:
        del title
        yield None


def make_output(*, plain: bool) -> Output:
    """Tables by `rich` if stdout is a terminal and the extra `cli` is installed, else plain text."""
    if plain or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        return PlainOutput()
    from ._rich_output import RichOutput  # noqa: PLC0415  # an extra

    return RichOutput()


def printable(name: str) -> str:
    """A name as it is, or quoted where it could be misread or move the cursor: files may hold any."""
    return name if name.isprintable() and name.strip() == name != "" else repr(name)
