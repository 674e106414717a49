"""One forward, one backward: each rank runs just as many microbatches ahead as it takes to keep busy."""

from typing import ClassVar

import attrs

from .._action import Op
from .._placement import loop_placement
from .._program import Program
from .._schedule import Schedule
from ._loop_order import loop_order


def one_f_one_b(*, ranks: int, microbatches: int) -> Program:
    """PipeDream-flush (Narayanan et al. 2021). Bubble (p − 1) / (m + p − 1); rank r holds p − r microbatches."""
    return interleaved_one_f_one_b(stages_per_rank=1, ranks=ranks, microbatches=microbatches)


def interleaved_one_f_one_b(*, stages_per_rank: int, ranks: int, microbatches: int) -> Program:
    """Interleaved 1F1B (Narayanan et al. 2021): rounds of microbatches go through a rank's stages in turn.

    With v stages on each of p ranks the bubble is (p − 1) / (v·m + p − 1) if p divides the microbatches; rank r holds
    2(p − r − 1) + (v − 1)·p + 1 pairs of stage and microbatch. Other counts work too, in rounds of more than p.
    """
    placement = loop_placement(ranks=ranks, stages_per_rank=stages_per_rank)
    orders = [
        loop_order(rank=rank, ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches, backward=Op.B)
        for rank in range(ranks)
    ]
    return Program(placement, microbatches, tuple(tuple(order.one_by_one()) for order in orders))


@attrs.frozen(kw_only=True)
class OneFOneB(Schedule):
    """One forward, one backward."""

    kind: ClassVar[str] = "1f1b"
    stages_per_rank: ClassVar[int] = 1

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `one_f_one_b`."""
        return one_f_one_b(ranks=ranks, microbatches=microbatches)


@attrs.frozen(kw_only=True)
class Interleaved1F1B(Schedule):
    """1F1B with several stages per rank."""

    kind: ClassVar[str] = "interleaved-1f1b"
    stages_per_rank: int = 2

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `interleaved_one_f_one_b`."""
        return interleaved_one_f_one_b(stages_per_rank=self.stages_per_rank, ranks=ranks, microbatches=microbatches)
