"""Forwards only."""

from collections import deque
from typing import ClassVar, Literal

import attrs

from .._action import Action, Op
from .._placement import loop_placement, v_placement
from .._program import Program
from .._schedule import Schedule


def inference(*, rank_of_stage: tuple[int, ...], microbatches: int) -> Program:
    """Each rank takes the deepest stage for which a microbatch waits: results come soon, and little waits.

    It runs over any placement, so also over that of the schedule by which the model is trained.
    """
    ranks = max(rank_of_stage) + 1
    stages_of = [[stage for stage, holder in enumerate(rank_of_stage) if holder == rank] for rank in range(ranks)]
    waiting = [deque(range(microbatches)), *(deque[int]() for _ in rank_of_stage)]  # the last for what has left
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while any(waiting[:-1]):
        moved = []
        for row, stages in zip(rows, stages_of):
            stage = next((stage for stage in reversed(stages) if waiting[stage]), None)
            if stage is not None:
                row.append(Action(Op.F, stage, waiting[stage].popleft()))
                moved.append(row[-1])
        for action in moved:  # after all ranks, so that a microbatch goes through one stage at a time
            assert action.microbatch is not None
            waiting[action.stage + 1].append(action.microbatch)
    return Program(rank_of_stage, microbatches, tuple(map(tuple, rows)))


@attrs.frozen(kw_only=True)
class Inference(Schedule):
    """Forwards only."""

    kind: ClassVar[str] = "inference"
    placement: Literal["loop", "v"] = "loop"
    """Stages go round the ranks, or down and up again, two per rank."""
    stages_per_rank: int = 1

    def __attrs_post_init__(self) -> None:
        if self.placement == "v" and self.stages_per_rank != 2:
            raise ValueError(
                f"placement='v' has two stages per rank, found stages_per_rank={self.stages_per_rank!r}; set 2"
            )

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """See `inference`."""
        if self.placement == "v":
            placement = v_placement(ranks=ranks)
        else:
            placement = loop_placement(ranks=ranks, stages_per_rank=self.stages_per_rank)
        return inference(rank_of_stage=placement, microbatches=microbatches)
