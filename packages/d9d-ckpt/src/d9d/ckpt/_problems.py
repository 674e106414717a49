"""Errors that tell everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_SHOWN = 200


class PlanError(ValueError):
    """A mapper does not lead from the source to the target. `problems` has one line for each thing wrong."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = [f"the plan has {len(self.problems)} problem(s):", *self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"... and {len(self.problems) - _SHOWN} more, all in the error's `problems`")
        super().__init__("\n  ".join(lines))


def problems_of(error: ValueError) -> Sequence[str]:
    """The lines that an error tells."""
    return error.problems if isinstance(error, PlanError) else [str(error)]


def raise_all(problems: Sequence[str]) -> None:
    """Raises one error for all problems, if there are any."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise PlanError(problems)


def for_all(items: Iterable[T], call: Callable[[T], R]) -> list[R]:
    """Calls for every item, and raises what all calls raised of ValueErrors together."""
    results: list[R] = []
    problems: list[str] = []
    for item in items:
        try:
            results.append(call(item))
        except ValueError as error:
            problems += problems_of(error)
    raise_all(problems)
    return results
