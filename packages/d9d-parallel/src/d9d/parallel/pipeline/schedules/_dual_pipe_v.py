"""DualPipeV: forwards and backwards in pairs, for each to hide the other's communication."""

from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import attrs

from .._action import Action, Op
from .._placement import v_placement
from .._program import Program
from .._schedule import Schedule


def dualpipev(*, ranks: int, microbatches: int) -> Program:
    """DualPipe cut in half (DeepSeek-AI 2025): the V's way up does what DualPipe's second direction does.

    In the main phase each rank alternates a forward of one of its stages with a backward of the other. It holds 2p + 1
    pairs of stage and microbatch. The eight phases suppose 2p microbatches; with fewer the same order has gaps.
    """
    placement = v_placement(ranks=ranks)
    supposed = max(microbatches, 2 * ranks)
    rows = (_row(rank, ranks, supposed) for rank in range(ranks))
    kept = range(microbatches)
    return Program(placement, microbatches, tuple(tuple(a for a in row if a.microbatch in kept) for row in rows))


def _row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """One rank's phases; 0 is its stage on the way down, 1 that on the way up, W the weights longest due."""
    below = ranks - rank - 1
    phases = [
        (2 * below, "F0"),
        (rank + 1, "F0 F1"),
        (below, "I1 W F1"),
        (microbatches - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
        (below, "B1 F1 B0"),
        ((rank + 1) // 2, "B1 B0"),
        ((rank + 1) % 2, "B1 I0"),
        ((rank + 1) // 2, "I1 I0"),
        (below, "W I0"),
        (rank + 1, "W"),
    ]
    stages = {"0": rank, "1": 2 * ranks - 1 - rank}
    forwards, backwards = (dict.fromkeys(stages, 0) for _ in range(2))
    due: deque[Action] = deque()
    for times, pattern in phases:
        for task in pattern.split() * times:
            if task == "W":
                yield due.popleft()
                continue
            op, way = Op(task[0]), task[1]
            counter = forwards if op is Op.F else backwards
            action = Action(op, stages[way], counter[way])
            counter[way] += 1
            yield action
            if op is Op.I:
                due.append(attrs.evolve(action, op=Op.W))


@attrs.frozen(kw_only=True)
class DualPipeV(Schedule):
    """Forwards and backwards in pairs; two stages per rank in a V."""

    kind: ClassVar[str] = "dualpipev"
    stages_per_rank: ClassVar[int] = 2

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `dualpipev`."""
        return dualpipev(ranks=ranks, microbatches=microbatches)
