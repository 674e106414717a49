"""How the tensors of a file lie in it: one after the other, from the first byte of the data to the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ._findings import Problem, ProblemKind


class Span(NamedTuple):
    """The bytes `[start, stop)` of the data, and the name of the tensor that has them."""

    name: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


def faults_of_spans(spans: Sequence[Span], nbytes: int, *, complete: bool) -> list[Problem]:
    """What is wrong with how spans, sorted by start and stop, lie in data of `nbytes`.

    Unless they are `complete`, bytes that none of them has may belong to others.
    """
    problems: list[Problem] = []
    end, last, gapless = 0, "", complete
    at: dict[tuple[int, int], str] = {}
    for span in spans:
        first = at.setdefault((span.start, span.stop), span.name)
        if first != span.name and span.start < span.stop:
            problems.append(Problem(ProblemKind.ALIASED, f"{span.name!r} has the same bytes as {first!r}, {span}"))
        elif span.start < end:
            text = f"{span.name!r} has {span} of the data, of which {last!r} takes a part"
            problems.append(Problem(ProblemKind.OVERLAPPING, text))
        elif span.start > end:
            gapless = False
            if complete and span.stop <= nbytes:  # what is out of range says so itself
                text = f"nothing is in [{end}, {span.start}) of the data, before {span.name!r}"
                problems.append(Problem(ProblemKind.HOLE, text))
        if span.stop > end:
            end, last = span.stop, span.name
    if end > nbytes and gapless and not problems:
        cut = next(span.name for span in spans if span.stop > nbytes)
        text = f"it ends in {cut!r}, {end - nbytes} bytes before the end of its data"
        problems.append(Problem(ProblemKind.TRUNCATED, text))
    elif end > nbytes:
        problems += [
            Problem(ProblemKind.OUT_OF_RANGE, f"{span.name!r} has {span} of the data, which has {nbytes} bytes")
            for span in spans
            if span.stop > nbytes
        ]
    elif end < nbytes and complete:
        problems.append(Problem(ProblemKind.TRAILING, f"{nbytes - end} bytes follow the last tensor"))
    return problems
