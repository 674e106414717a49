"""What a rank of a pipeline does, one thing at a time."""

import enum
import re
from typing import Self

import attrs


class Op(enum.Enum):
    """Kinds of actions."""

    F = "F"
    """Forward of a microbatch through a stage; on the last stage the loss too."""
    B = "B"
    """Whole backward: gradients of inputs and weights."""
    I = "I"  # noqa: E741 — the field's letter
    """Gradients of the inputs only."""
    W = "W"
    """Gradients of the weights only, after I."""
    SEND_F = "SEND_F"
    """The stage's output leaves to the next stage."""
    RECV_F = "RECV_F"
    """The stage's input arrives from the stage before."""
    SEND_B = "SEND_B"
    """The gradient of the stage's input leaves to the stage before."""
    RECV_B = "RECV_B"
    """The gradient of the stage's output arrives from the next stage."""
    UNSHARD = "UNSHARD"
    """The stage's parameters are gathered."""
    RESHARD = "RESHARD"
    """The gathered parameters are freed."""
    REDUCE = "REDUCE"
    """The stage's gradients, complete now, are summed over its replicas."""

    __hash__ = object.__hash__  # Enum hashes the name in Python, half the time of a simulation


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
TRANSFERS = SENDS | RECEIVES
GATHERS = frozenset({Op.UNSHARD, Op.RESHARD})
PER_STAGE = GATHERS | {Op.REDUCE}

_SPELLED = {op: op.value for op in Op} | {Op.REDUCE: "REDUCE_GRAD"}
_OPS = {spelled: op for op, spelled in _SPELLED.items()}
_PATTERN = re.compile(rf"(\d+)({'|'.join(sorted(_OPS, key=len, reverse=True))})(\d*)")
_OTHER_END = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}


@attrs.frozen
class Action:
    """One action of one rank.

    ``str(action)`` is the spelling of torch's pipeline CSV: ``1F0``, ``2SEND_F3``, ``0UNSHARD``, ``0REDUCE_GRAD``.

    Raises:
        ValueError: If a microbatch is missing, or given to UNSHARD, RESHARD or REDUCE, which concern a whole stage.
    """

    op: Op
    stage: int
    """Over the whole model, from 0."""
    microbatch: int | None = None
    """Within the step, from 0; ``None`` for UNSHARD, RESHARD and REDUCE."""

    def __attrs_post_init__(self) -> None:
        if (self.microbatch is None) != (self.op in PER_STAGE):
            rule = "concerns a whole stage: leave the microbatch out" if self.op in PER_STAGE else "needs a microbatch"
            raise ValueError(f"{self.op.name} of stage {self.stage!r} {rule}, got microbatch={self.microbatch!r}")

    @property
    def other_end(self) -> Self:
        """The receive of a send, and the send of a receive: ``2SEND_F3`` and ``3RECV_F3``."""
        op, step = _OTHER_END[self.op]
        return type(self)(op, self.stage + step, self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` wrote.

        Raises:
            ValueError: If ``text`` is nothing of the kind.
        """
        found = _PATTERN.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is no action: write stage, op, microbatch, such as '1F0', '2SEND_F3', '0UNSHARD'"
            )
        stage, op, microbatch = found.groups()
        return cls(_OPS[op], int(stage), int(microbatch) if microbatch else None)

    def __str__(self) -> str:
        return f"{self.stage}{_SPELLED[self.op]}{'' if self.microbatch is None else self.microbatch}"
