"""Gradients of hidden states and of weights that a backward pass computes together or apart.

The engine cannot leave out one gradient of a Python function: it runs all of ``backward`` or nothing. So hidden states
and weights have a node each, which adds 0 to the result. Where a pass runs both, that of the hidden states, which comes
first, computes all gradients in one go and leaves the weights' to the other node.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from ._second_derivative import refuse_second_derivative


class Backward(Protocol):
    """The gradients of one operation."""

    def __call__(
        self, upstream: Tensor, saved: Sequence[Tensor | None], needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, ...]:
        """Those of hidden states, weight and bias that are needed, and None for the others."""
        ...


def with_gradients(
    made: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    saved: Sequence[Tensor | None],
    backward: Backward,
) -> Tensor:
    """What an operation made without recording, with the gradients that ``backward`` gives it of what it ``saved``."""
    meeting = _Meeting(backward)
    saved = [None if x is None else x.detach() for x in saved]
    # Of two nodes that can run the engine takes the one made last.
    of_weights = _Weights.apply(meeting, made, saved, weight, bias)
    of_hidden = _Hidden.apply(meeting, made, saved, of_weights.grad_fn, hidden)
    zeros: Tensor = of_weights + of_hidden
    return made + zeros


@attrs.define
class _Meeting:
    """Where the two nodes of one operation meet in backward."""

    backward: Backward
    left: tuple[Tensor, Sequence[Tensor | None]] | None = None
    """What the hidden states' node has computed for the weights', and of which upstream gradient."""


def _zeros(ctx: Any, meeting: _Meeting, like: Tensor, saved: Sequence[Tensor | None]) -> Tensor:
    ctx.meeting = meeting
    ctx.save_for_backward(*saved)
    return like.new_zeros(()).expand(like.shape)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - of autograd, which takes no keywords
        ctx: Any, meeting: _Meeting, like: Tensor, saved: Sequence[Tensor | None], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        del weight, bias
        return _zeros(ctx, meeting, like, saved)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (upstream,) = upstreams
        meeting: _Meeting = ctx.meeting
        left, meeting.left = meeting.left, None
        if left is not None and left[0] is upstream:  # else it is of a pass that has failed
            return None, None, None, *left[1]
        needs_weight, needs_bias = ctx.needs_input_grad[3:]
        needs = (False, needs_weight, needs_bias)
        return None, None, None, *meeting.backward(upstream, ctx.saved_tensors, needs)[1:]


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - of autograd, which takes no keywords
        ctx: Any, meeting: _Meeting, like: Tensor, saved: Sequence[Tensor | None], weights_node: Any, hidden: Tensor
    ) -> Tensor:
        del hidden
        ctx.weights_node = weights_node
        return _zeros(ctx, meeting, like, saved)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (upstream,) = upstreams
        meeting: _Meeting = ctx.meeting
        # As `torch.autograd.graph.register_multi_grad_hook` asks the engine; nothing public tells.
        will_run: Any = torch._C._will_engine_execute_node  # noqa: SLF001
        needs_weight = needs_bias = False
        if ctx.weights_node is not None and will_run(ctx.weights_node):
            needs_weight, needs_bias = ctx.weights_node.needs_input_grad[3:]
        needs = (True, needs_weight, needs_bias)
        of_hidden, *of_weights = meeting.backward(upstream, ctx.saved_tensors, needs)
        if needs_weight or needs_bias:
            meeting.left = upstream, of_weights
        return None, None, None, None, of_hidden
