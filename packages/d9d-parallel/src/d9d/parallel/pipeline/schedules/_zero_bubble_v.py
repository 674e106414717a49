"""ZBV: stages go down the ranks and up again, and weight gradients fill every gap."""

from typing import ClassVar

import attrs

from .._action import Action, Op
from .._placement import v_placement
from .._program import Program
from .._schedule import Schedule


def zbv(*, ranks: int, microbatches: int) -> Program:
    """ZBV (Qi et al. 2023, 2024): no bubble but the ranks' start one after the other, in the memory of 1F1B.

    Each rank takes the first that it can of: the forward of its stage on the way up; a backward on the way down, whose
    result is the longest due; a backward on the way up; another forward on the way down, if fewer than 2p pairs of
    stage and microbatch are alive on the rank; a weight gradient. In unit costs this takes 6m + p − 1 for m ≥ 2p
    microbatches on p ranks, the least that is possible: m microbatches' work on each rank, the last one starting
    p − 1 later.
    """
    placement = v_placement(ranks=ranks)
    last = len(placement) - 1
    ended: dict[tuple[Op, int], list[int]] = {(op, s): [] for op in (Op.F, Op.I, Op.W) for s in range(last + 1)}

    def ready(op: Op, stage: int, now: int) -> bool:
        """Whether the next microbatch may go through a stage."""
        microbatch = len(ended[op, stage])
        needs = {
            Op.F: [(Op.F, stage - 1)] if stage else [],
            Op.I: [(Op.F, stage), (Op.I, stage + 1)] if stage < last else [(Op.F, stage)],
            Op.W: [(Op.I, stage)],
        }[op]
        return microbatch < microbatches and all(
            microbatch < len(ended[need]) and ended[need][microbatch] <= now for need in needs
        )

    rows: list[list[Action]] = [[] for _ in range(ranks)]
    now = 0
    while any(len(row) < 6 * microbatches for row in rows):
        for rank, row in enumerate(rows):
            down, up = rank, last - rank
            live = sum(len(ended[Op.F, stage]) - len(ended[Op.W, stage]) for stage in (down, up))
            wishes = [(Op.F, up), (Op.I, down), (Op.I, up), (Op.F, down), (Op.W, down), (Op.W, up)]
            if live >= 2 * ranks:
                wishes = [wish for wish in wishes if wish[0] is not Op.F]
            chosen = next((wish for wish in wishes if ready(*wish, now)), None)
            if chosen is not None:
                row.append(Action(*chosen, len(ended[chosen])))
                ended[chosen].append(now + 1)
        now += 1
    return Program(placement, microbatches, tuple(map(tuple, rows)))


@attrs.frozen(kw_only=True)
class ZeroBubbleV(Schedule):
    """No bubble in steady state with F = I = W, in the memory of 1F1B; two stages per rank in a V."""

    kind: ClassVar[str] = "zbv"
    stages_per_rank: ClassVar[int] = 2

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `zbv`."""
        return zbv(ranks=ranks, microbatches=microbatches)
