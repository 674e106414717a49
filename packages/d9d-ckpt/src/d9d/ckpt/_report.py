"""What `verify` found."""

from __future__ import annotations

from pathlib import Path

import attrs

from ._findings import Problem


@attrs.frozen(kw_only=True)
class Report:
    """What was looked at and what is wrong with it; prints as one line for each."""

    path: Path
    files: int
    """How many files hold the tensors."""
    tensors: int
    """How many there are."""
    nbytes: int
    """Size of their data."""
    problems: tuple[Problem, ...]
    """What makes the checkpoint unusable, or other than it says."""
    notes: tuple[Problem, ...]
    """What is no fault, but may not be meant."""

    @property
    def sound(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __str__(self) -> str:
        title = f"{self.path}: {self.tensors} tensors of {self.nbytes} bytes in {self.files} file(s)"
        verdict = "sound" if self.sound else f"{len(self.problems)} problem(s)"
        notes = [f"note: {note}" for note in self.notes]
        return "\n  ".join([f"{title}: {verdict}", *map(str, self.problems), *notes])
