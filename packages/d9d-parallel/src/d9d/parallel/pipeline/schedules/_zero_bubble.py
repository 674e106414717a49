"""1F1B whose weight gradients wait: ZB-H1, and its form with several stages per rank."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import ClassVar

import attrs

from .._action import Action, Op
from .._placement import loop_placement
from .._program import Program
from .._schedule import Schedule
from ._loop_order import loop_order


def zb_h1(*, ranks: int, microbatches: int) -> Program:
    """ZB-H1 (Qi et al. 2023): 1F1B whose weight gradients wait, and fill the bubble.

    Bubble (p − 1) / (3m + p − 1) with F = I = W and m ≥ p, a third of what 1F1B idles; each rank holds p microbatches.
    """
    return interleaved_zero_bubble(stages_per_rank=1, ranks=ranks, microbatches=microbatches)


def interleaved_zero_bubble(*, stages_per_rank: int, ranks: int, microbatches: int) -> Program:
    """Interleaved 1F1B whose weight gradients wait, on each rank up to the memory of rank 0 (Qi et al. 2023)."""
    placement = loop_placement(ranks=ranks, stages_per_rank=stages_per_rank)
    orders = [
        loop_order(rank=rank, ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches, backward=Op.I)
        for rank in range(ranks)
    ]
    limit = orders[0].ahead + 1
    return Program(placement, microbatches, tuple(tuple(_delay_weights(o.one_by_one(), limit=limit)) for o in orders))


def _delay_weights(row: Iterable[Action], *, limit: int) -> Iterator[Action]:
    """Put a W for each I of ``row``, as late as ``limit`` live activations allow.

    At the end, when I follows I, one W goes before each: it fills the time until the ranks below have made the next.
    """
    waiting: deque[Action] = deque()
    live, previous = 0, Op.F
    for action in row:
        full = action.op is Op.F and live == limit
        draining = action.op is Op.I and previous is Op.I
        if waiting and (full or draining):
            yield waiting.popleft()
            live -= 1
        if action.op is Op.F:
            live += 1
        else:
            waiting.append(attrs.evolve(action, op=Op.W))
        yield action
        previous = action.op
    yield from waiting


@attrs.frozen(kw_only=True)
class ZeroBubbleH1(Schedule):
    """1F1B whose weight gradients wait, and fill two thirds of its bubble in the memory of its rank 0."""

    kind: ClassVar[str] = "zb-h1"
    stages_per_rank: ClassVar[int] = 1

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `zb_h1`."""
        return zb_h1(ranks=ranks, microbatches=microbatches)


@attrs.frozen(kw_only=True)
class InterleavedZeroBubble(Schedule):
    """ZB-H1 with several stages per rank."""

    kind: ClassVar[str] = "interleaved-zb"
    stages_per_rank: int = 2

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `interleaved_zero_bubble`."""
        return interleaved_zero_bubble(stages_per_rank=self.stages_per_rank, ranks=ranks, microbatches=microbatches)
