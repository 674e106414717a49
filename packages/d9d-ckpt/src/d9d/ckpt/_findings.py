"""What can be wrong with a checkpoint, by kind."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path

import attrs

SHOWN = 50


class ProblemKind(enum.Enum):
    """Kinds of problems that `verify` finds."""

    MALFORMED = "malformed"
    """A header, an index or a manifest that is not what the format says."""
    TRUNCATED = "truncated"
    """A file ends early."""
    TRAILING = "trailing bytes"
    """A file goes on after its last tensor."""
    UNKNOWN_DTYPE = "unknown dtype"
    """A dtype that the format or torch lacks."""
    WRONG_SIZE = "wrong size"
    """The bytes of a tensor are more or fewer than its shape and dtype need."""
    OUT_OF_RANGE = "out of range"
    """The bytes of a tensor lie beyond the end of its file."""
    OVERLAPPING = "overlapping"
    """Tensors share a part of their bytes."""
    ALIASED = "aliased"
    """Several names stand for the same bytes of a file."""
    HOLE = "hole"
    """Bytes between tensors that belong to none."""
    DUPLICATE = "duplicate"
    """A name comes twice, in one file or in several."""
    OUTSIDE = "outside"
    """A file name leads out of the directory of the checkpoint."""
    MISSING_FILE = "missing file"
    """A file that an index, a manifest or the numbers of the others ask for."""
    MISSING_TENSOR = "missing tensor"
    """A tensor that the index has in a file that lacks it."""
    UNLISTED_TENSOR = "unlisted tensor"
    """A tensor that the index lacks or has elsewhere."""
    UNLISTED_FILE = "unlisted file"
    """A safetensors file that the index does not name: it is never read."""
    TOTAL_SIZE = "total size"
    """The index says another size than the tensors have."""
    SEVERAL_INDEXES = "several indexes"
    """A directory with more than one index is ambiguous."""
    UNREADABLE = "unreadable"
    """The system does not give the file."""
    CHECKSUM = "checksum"
    """Data of a job checkpoint differs from what was written."""
    NOT_FINITE = "not finite"
    """NaN or infinite values."""
    EQUAL = "equal"
    """Tensors with the same content under several names, such as a tied head that was written twice."""


@attrs.frozen
class Problem:
    """One thing that is wrong."""

    kind: ProblemKind
    text: str
    file: str | None = None
    """The file that it is about, where that is one and the text does not say so."""

    def __str__(self) -> str:
        where = "" if self.file is None else f"{self.file!r}: "
        return f"{self.kind.value}: {where}{self.text}"


class FileError(ValueError):
    """A file is not what its format says. `problems` has all that is wrong with it; the message has the first."""

    def __init__(self, path: Path, what: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"{str(path)!r} is {what}:", *shortened(problems)]))


def shortened(problems: Sequence[Problem]) -> list[str]:
    """The first problems as lines, and how many more there are."""
    more = len(problems) - SHOWN
    return [*map(str, problems[:SHOWN]), *([f"... and {more} more"] if more > 0 else [])]
