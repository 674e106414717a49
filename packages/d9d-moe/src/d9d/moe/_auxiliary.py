"""Auxiliary losses, carried by an activation into the backward pass."""

from typing import Any

import torch
from torch import Tensor


def attach_auxiliary(x: Tensor, aux_sum: Tensor) -> Tensor:
    """Give x; when its gradient is computed, the gradient of ``aux_sum`` is computed with it, and is 1.

    So the loss that is differentiated becomes loss + aux_sum without passing aux_sum out of the model, through pipeline
    stages and checkpointed blocks alike. Losses are sums here: what scales gradients by the weight of the batch scales
    this one too. Scaling the loss before ``backward`` does not.

    Args:
        x: Any activation on the way to the loss.
        aux_sum: A summed loss, of one element and no dims.

    Raises:
        ValueError: ``aux_sum`` has dims.
    """
    if aux_sum.dim():
        raise ValueError(f"aux_sum must be a sum of no dims, found shape {tuple(aux_sum.shape)!r}; sum it first")
    attached: Tensor = _AttachAuxiliary.apply(x, aux_sum)
    return attached


class _AttachAuxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, aux_sum: Tensor) -> Tensor:
        ctx.aux_dtype, ctx.aux_device = aux_sum.dtype, aux_sum.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=ctx.aux_dtype, device=ctx.aux_device)
