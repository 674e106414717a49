"""All forwards, then all backwards: GPipe, and its form with several stages per rank."""

from typing import ClassVar

import attrs

from .._action import Action, Op
from .._placement import loop_placement
from .._program import Program
from .._schedule import Schedule


def looped_bfs(*, stages_per_rank: int, ranks: int, microbatches: int) -> Program:
    """Each stage takes all microbatches before the rank turns to its next one (Lamy-Poirier 2022, breadth-first).

    Every activation of the step is alive at once. Bubble with F = I = W and m ≥ p:
    (p − 1) / (v·m + p − 1) for v stages on each of p ranks.
    """
    placement = loop_placement(ranks=ranks, stages_per_rank=stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = range(rank, len(placement), ranks)
        forwards = [Action(Op.F, stage, m) for stage in stages for m in range(microbatches)]
        backwards = [Action(Op.B, stage, m) for stage in reversed(stages) for m in range(microbatches)]
        rows.append((*forwards, *backwards))
    return Program(placement, microbatches, tuple(rows))


def gpipe(*, ranks: int, microbatches: int) -> Program:
    """All forwards, then all backwards (Huang et al. 2019). Bubble (p − 1) / (m + p − 1), m microbatches alive."""
    return looped_bfs(stages_per_rank=1, ranks=ranks, microbatches=microbatches)


@attrs.frozen(kw_only=True)
class GPipe(Schedule):
    """All forwards, then all backwards."""

    kind: ClassVar[str] = "gpipe"
    stages_per_rank: ClassVar[int] = 1

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `gpipe`."""
        return gpipe(ranks=ranks, microbatches=microbatches)


@attrs.frozen(kw_only=True)
class LoopedBFS(Schedule):
    """GPipe with several stages per rank."""

    kind: ClassVar[str] = "looped-bfs"
    stages_per_rank: int = 2

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `looped_bfs`."""
        return looped_bfs(stages_per_rank=self.stages_per_rank, ranks=ranks, microbatches=microbatches)
