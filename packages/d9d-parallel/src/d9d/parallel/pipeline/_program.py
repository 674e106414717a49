"""What all ranks of a pipeline do in one step."""

from typing import Self

import attrs

from ._action import COMPUTE, Action, Op


@attrs.frozen
class Program:
    """The actions of each rank, in order; a value without any behaviour of its own.

    A program of F, B, I and W says who computes what when. `derive` completes it with transfers, gathers and
    reductions; `simulate` proves a complete one and times it.

    Raises:
        ValueError: If there is no microbatch, no rank, or a stage lives on a rank that does not exist.
    """

    rank_of_stage: tuple[int, ...]
    """Placement: the rank that holds each stage."""
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """Per rank, in order."""

    def __attrs_post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(
                f"a program needs microbatches, got {self.microbatches!r}; the nearest supported count is 1"
            )
        strays = {stage: rank for stage, rank in enumerate(self.rank_of_stage) if rank not in range(self.ranks)}
        if strays or not self.actions:
            raise ValueError(
                f"the program has actions for {self.ranks!r} ranks, and stages on others (stage: rank): {strays!r}"
            )

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """How many stages there are, over all ranks."""
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in the order of the model."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    @property
    def is_training(self) -> bool:
        """Whether there is any backward."""
        return any(action.op in {Op.B, Op.I, Op.W} for actions in self.actions for action in actions)

    def computations(self) -> Self:
        """The program of F, B, I and W that this one completes."""
        return attrs.evolve(self, actions=tuple(tuple(a for a in row if a.op in COMPUTE) for row in self.actions))

    def peer(self, transfer: Action) -> int:
        """The rank at the other end of a SEND or RECV."""
        return self.rank_of_stage[transfer.other_end.stage]

    def send_after(self, action: Action) -> Action | None:
        """The SEND that takes away what a compute action makes, ``None`` where it stays on the rank."""
        match action.op:
            case Op.F:
                send = Action(Op.SEND_F, action.stage, action.microbatch)
            case Op.B | Op.I:
                send = Action(Op.SEND_B, action.stage, action.microbatch)
            case _:
                return None
        return send if self.crosses_ranks(send) else None

    def receive_before(self, action: Action) -> Action | None:
        """The RECV that brings what a compute action reads, ``None`` where that is on the rank already."""
        match action.op:
            case Op.F:
                receive = Action(Op.RECV_F, action.stage, action.microbatch)
            case Op.B | Op.I:
                receive = Action(Op.RECV_B, action.stage, action.microbatch)
            case _:
                return None
        return receive if self.crosses_ranks(receive) else None

    def crosses_ranks(self, transfer: Action) -> bool:
        """Whether a SEND or RECV has an other end, and has it on another rank."""
        other = transfer.other_end.stage
        return other in range(self.stages) and self.rank_of_stage[other] != self.rank_of_stage[transfer.stage]
