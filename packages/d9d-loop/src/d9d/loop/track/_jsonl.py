"""One JSON object a step, each step once, whatever was killed when."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import attrs

from ._tracker import Number, Tracker, TrackerConfig


class JsonLinesTracker(Tracker):
    """Appends ``{"step": …, …}`` lines to a file.

    Opening drops, atomically, the lines of steps after `done` and a line that a kill has torn. Floats are written so
    that reading gives back the same bits; those that JSON lacks are the strings ``"nan"``, ``"inf"`` and ``"-inf"``,
    which ``float`` reads.

    Args:
        file: Created where it does not exist.
        done: The last step to keep.
    """

    def __init__(self, file: Path, *, done: int) -> None:
        if file.exists():
            _drop_after(file, done)
        self._stream = file.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Append one line by one write, so that a kill leaves it whole or absent."""
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self._stream.write(json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n")

    def flush(self) -> None:
        """Wait until the lines are on disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


@attrs.frozen(kw_only=True)
class JsonLinesConfig(TrackerConfig):
    """JSON lines in the directory of the run."""

    kind: ClassVar[str] = "jsonl"

    name: str = "log.jsonl"
    """File name."""

    def open(self, directory: Path, *, done: int, steps: int) -> JsonLinesTracker:  # noqa: ARG002
        """See `TrackerConfig.open`."""
        return JsonLinesTracker(directory / self.name, done=done)


def _drop_after(file: Path, done: int) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= done]
    if len(kept) == len(lines):
        return
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as stream:
        stream.writelines(kept)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def _step_of(line: bytes) -> float:
    """The step of a line; infinity for one that is torn."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
