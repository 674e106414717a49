"""What a tracker is, and how a config file chooses one."""

import abc
from collections.abc import Mapping
from pathlib import Path

import attrs

from .._choice import Choice

Number = int | float


class Tracker(abc.ABC):
    """Takes the numbers of a run, on the main rank only."""

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Take the numbers of one step; steps are counted from 1 and come in order."""

    def flush(self) -> None:  # noqa: B027 (nothing to do unless a tracker says so)
        """Make durable what was logged; called before a checkpoint is saved, which the run may resume from."""

    def close(self) -> None:  # noqa: B027 (the same)
        """Take leave; called once, also after an error."""


@attrs.frozen(kw_only=True)
class TrackerConfig(Choice, abc.ABC):
    """A tracker that is yet to be opened."""

    @abc.abstractmethod
    def open(self, directory: Path, *, done: int, steps: int) -> Tracker:
        """Open it for a run that goes on after `done` steps.

        What was logged of later steps, by a process that was killed, will be logged again: it must be forgotten.

        Args:
            directory: Of the run; it exists.
            done: Steps made already; 0 for a run that starts.
            steps: Steps of the whole run.
        """
