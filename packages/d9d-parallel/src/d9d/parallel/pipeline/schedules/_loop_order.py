"""In which order microbatches go round a loop of stages."""

from collections.abc import Iterator
from itertools import pairwise

import attrs

from .._action import Action, Op


@attrs.frozen(kw_only=True)
class LoopOrder:
    """One rank's part of a loop."""

    forwards: tuple[Action, ...]
    backwards: tuple[Action, ...]
    ahead: int
    """How many forwards come before the first pair of a forward and a backward."""

    def one_by_one(self) -> Iterator[Action]:
        """Forwards and backwards in turns, some more forwards at first, and as many more backwards at last."""
        yield from self.forwards[: self.ahead]
        for forward, backward in zip(self.forwards[self.ahead :], self.backwards):
            yield forward
            yield backward
        yield from self.backwards[max(len(self.forwards) - self.ahead, 0) :]


def loop_order(*, rank: int, ranks: int, stages_per_rank: int, microbatches: int, backward: Op) -> LoopOrder:
    """Rounds of microbatches go through the stages of a rank in turn, backwards through them in reverse.

    Rounds have at least as many microbatches as there are ranks: in a shorter one, rank 0 would wait in each turn of
    the loop for the first microbatch to come back from the last rank. How far forwards run ahead is that of Narayanan
    et al. 2021: 2(p − r − 1) + (v − 1)·p for v stages on rank r of p, with v = 1 p − r − 1.
    """
    rounds = max(microbatches // ranks, 1)
    bounds = [microbatches * index // rounds for index in range(rounds + 1)]
    longest = max(end - start for start, end in pairwise(bounds))
    stages = range(rank, stages_per_rank * ranks, ranks)
    forwards, backwards = (
        tuple(Action(op, stage, m) for start, end in pairwise(bounds) for stage in turn for m in range(start, end))
        for op, turn in ((Op.F, stages), (backward, stages[::-1]))
    )
    hops = ranks - rank - 1
    ahead = hops if stages_per_rank == 1 else 2 * hops + (stages_per_rank - 1) * longest
    return LoopOrder(forwards=forwards, backwards=backwards, ahead=ahead)
