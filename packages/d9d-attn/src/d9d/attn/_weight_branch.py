"""Fused operations whose gradients of inputs and of weights can be computed together or apart.

The engine cannot leave out one gradient of a Python function: it runs all of ``backward`` or nothing. So inputs and
weights have a node each, and one more node, the join, hands the gradients of the outputs to both. Where the pass at
hand runs both, the inputs' node, which comes first, computes everything in one go and leaves the weights' part for the
other: a pass over inputs alone computes nothing for weights, a pass over weights alone nothing for inputs, and a whole
pass reads memory once.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import attrs
import torch
from torch import Tensor

from ._second_derivative import refuse_second_derivative

Gradients: TypeAlias = tuple[Tensor | None, ...]


class Backward(Protocol):
    """The gradients of one operation."""

    def __call__(
        self, upstream: Gradients, saved: tuple[Tensor, ...], *, inputs: bool, weights: bool
    ) -> tuple[Gradients, Gradients]:
        """Return a gradient for each input if these are asked for, and one for each weight if those are.

        ``upstream`` has None where nothing came; for weights alone it has only the outputs that they read.
        """
        ...


def branched(
    outputs: Sequence[Tensor],
    *,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    backward: Backward,
    read_by_weights: int,
) -> tuple[Tensor, ...]:
    """Give gradients to what an operation computed without recording.

    Args:
        outputs: Fresh tensors: no operand and no view of one.
        inputs: Operands of the one branch; one of them requires grad.
        weights: Operands of the other; one of them requires grad.
        saved: What ``backward`` reads besides the gradients of the outputs.
        backward: The gradients.
        read_by_weights: Gradients of weights depend on those of the first so many outputs.

    Returns:
        The outputs, which require grad.
    """
    meeting = _Meeting(backward)
    # Of two nodes that can run the engine takes the one made last.
    of_weights = _Weights.apply(meeting, saved, tuple(outputs[:read_by_weights]), *weights)
    of_inputs = _Inputs.apply(meeting, saved, tuple(outputs), *inputs)
    joined: tuple[Tensor, ...] = _Join.apply(meeting, tuple(outputs), *of_inputs, *of_weights)
    return joined


@attrs.define
class _Meeting:
    """Where the branches of one operation meet in backward."""

    backward: Backward
    is_whole: bool = False
    """Whether the pass at hand runs both branches, and the weights' has not run."""
    left: Gradients | None = None
    """What the inputs' branch has computed for the weights'."""


def _stand_ins(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors of these shapes without memory, that nobody reads."""
    return tuple(y.new_empty(()).expand(y.shape) for y in outputs)


def _save(ctx: Any, meeting: _Meeting, saved: Sequence[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.meeting = meeting
    # Detached: an output that is saved would hold this node, which holds the output.
    ctx.save_for_backward(*(x.detach() for x in saved))


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, meeting: _Meeting, saved: Sequence[Tensor], outputs: tuple[Tensor, ...], *_: Tensor
    ) -> tuple[Tensor, ...]:
        _save(ctx, meeting, saved)
        return _stand_ins(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Gradients:
        meeting: _Meeting = ctx.meeting
        weights, meeting.is_whole = meeting.is_whole, False
        of_inputs, of_weights = meeting.backward(upstream, ctx.saved_tensors, inputs=True, weights=weights)
        meeting.left = of_weights if weights else None
        return None, None, None, *of_inputs


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, meeting: _Meeting, saved: Sequence[Tensor], outputs: tuple[Tensor, ...], *_: Tensor
    ) -> tuple[Tensor, ...]:
        _save(ctx, meeting, saved)
        return _stand_ins(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Gradients:
        meeting: _Meeting = ctx.meeting
        gradients, meeting.left, meeting.is_whole = meeting.left, None, False
        if gradients is None:
            gradients = meeting.backward(upstream, ctx.saved_tensors, inputs=False, weights=True)[1]
        return None, None, None, *gradients


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, meeting: _Meeting, outputs: tuple[Tensor, ...], *stand_ins: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.meeting = meeting
        ctx.read_by_weights = len(stand_ins) - len(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Gradients:
        refuse_second_derivative()
        meeting: _Meeting = ctx.meeting
        meeting.left = None
        # As `torch.autograd.graph.register_multi_grad_hook` asks the engine; nothing public tells.
        will_run: Any = torch._C._will_engine_execute_node  # noqa: SLF001
        meeting.is_whole = all(will_run(node) for node, _ in ctx.next_functions if node is not None)
        return None, None, *upstream, *upstream[: ctx.read_by_weights]
