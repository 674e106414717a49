"""A proven program, as one rank sees it."""

from collections.abc import Iterable

import attrs

from ._action import Action, Op
from ._program import Program
from ._simulate import simulate


@attrs.frozen
class Plan:
    """A complete program and the rank that runs it.

    Raises:
        ProgramError: The program is wrong.
    """

    program: Program
    rank: int
    is_training: bool = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.program.is_training, takes_self=True)
    )
    """Whether there is any backward."""
    last_weight_gradients: frozenset[Action] = attrs.field(
        init=False, default=attrs.Factory(lambda self: _last_weight_gradients(self.actions), takes_self=True)
    )
    """For each stage of this rank, the last action that adds to its weights' gradients."""

    def __attrs_post_init__(self) -> None:
        simulate(self.program)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What this rank does, in order."""
        return self.program.actions[self.rank]

    @property
    def last_stage(self) -> int:
        """The stage that gives the model's output."""
        return self.program.stages - 1

    def is_here(self, stage: int) -> bool:
        """Whether this rank holds a stage."""
        return self.program.rank_of_stage[stage] == self.rank

    def peer(self, transfer: Action) -> int:
        """The rank at the other end of a SEND or RECV."""
        return self.program.peer(transfer)


def _last_weight_gradients(actions: Iterable[Action]) -> frozenset[Action]:
    return frozenset({action.stage: action for action in actions if action.op in {Op.B, Op.W}}.values())
