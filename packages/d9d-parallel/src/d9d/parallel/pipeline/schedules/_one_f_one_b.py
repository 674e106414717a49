"""One forward, one backward: each rank starts just as many microbatches as it takes to keep busy."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import attrs

from .._action import Action, Op
from .._placement import loop_placement
from .._program import Program
from .._schedule import Schedule


def one_f_one_b(*, ranks: int, microbatches: int) -> Program:
    """PipeDream-flush (Narayanan et al. 2021a). Bubble (p − 1) / (m + p − 1); rank r holds p − r microbatches."""
    forwards, backwards = ([Action(op, 0, m) for m in range(microbatches)] for op in (Op.F, Op.B))
    rows = []
    for rank in range(ranks):
        row = _alternate(forwards, backwards, ahead=ranks - rank - 1)
        rows.append(tuple(attrs.evolve(action, stage=rank) for action in row))
    return Program(loop_placement(ranks=ranks, stages_per_rank=1), microbatches, tuple(rows))


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int) -> Iterator[Action]:
    """Forwards and backwards in turns, with ``ahead`` more forwards at first and as many more backwards at last."""
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[max(len(forwards) - ahead, 0) :]


@attrs.frozen(kw_only=True)
class OneFOneB(Schedule):
    """One forward, one backward."""

    kind: ClassVar[str] = "1f1b"
    stages_per_rank: ClassVar[int] = 1

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `one_f_one_b`."""
        return one_f_one_b(ranks=ranks, microbatches=microbatches)
