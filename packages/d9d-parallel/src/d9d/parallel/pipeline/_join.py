"""Fused operations whose gradients can be computed apart.

The engine cannot leave out one gradient of a Python function: it runs all of ``backward`` or nothing. So each gradient
gets a node of its own, and one more node hands the gradients of the outputs to all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@attrs.frozen(kw_only=True)
class Branch:
    """The gradient of an operation for some of its operands."""

    operands: Sequence[Tensor]
    """Tensors that the operation read."""
    gradient: Callable[..., Sequence[Tensor | None]]
    """``gradient(output_gradients, *saved)`` gives one for each operand; a tuple of output gradients, without None."""
    saved: Sequence[Tensor] = ()
    """What ``gradient`` reads besides: alive until it has run, or not at all if no operand requires grad."""


def join(outputs: Sequence[Tensor], *branches: Branch) -> tuple[Tensor, ...]:
    """Gives gradients to what an operation computed without recording, under `torch.no_grad`.

    With one branch for the inputs and one for the weights, a split backward pass computes each gradient in its part.
    What no operand that requires grad asks for is never computed.

    Args:
        outputs: Fresh tensors: no operand and no view of one.
        branches: The gradients, each operand in one of them.

    Returns:
        The outputs; they require grad if an operand does.

    Raises:
        ValueError: If an output has been recorded.
    """
    for index, y in enumerate(outputs):
        if y.requires_grad:
            raise ValueError(f"output {index!r} of join was recorded by autograd: compute it under torch.no_grad()")
    stand_ins = [_Branch.apply(branch.gradient, branch.saved, tuple(outputs), *branch.operands) for branch in branches]
    joined: tuple[Tensor, ...] = _Join.apply(tuple(outputs), *(y for of_branch in stand_ins for y in of_branch))
    return joined


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gradient: Callable[..., Sequence[Tensor | None]],
        saved: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *_operands: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        # Detached: an output that is saved would hold this node, which holds the output.
        ctx.save_for_backward(*(tensor.detach() for tensor in saved))
        return tuple(y.new_zeros(()).expand(y.shape) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.gradient(gradients, *ctx.saved_tensors)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: tuple[Tensor, ...], *stand_ins: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.branches = len(stand_ins) // len(outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(gradients * ctx.branches)
