"""The norm's kernels as operators of torch, and their gradients.

One operator stands for norms with and without a residual: without, its second result is empty. Shapes: D columns.
"""

from typing import Any

import torch
from torch import Tensor

from .._kernel_choice import only, rows_of
from .._operator import operator


@operator("d9d::rms_norm")
def rms_norm_operator(
    x: Tensor,
    residual: Tensor | None,
    weight_D: Tensor,
    eps: float,
    zero_centered: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm (..., D), the sum where there is a residual, and 1 / root mean square (...), fp32."""
    from ._launch import normalize  # noqa: PLC0415 - imports Triton, which takes a second

    with torch.cuda.device_of(x):  # Triton launches on the current device
        y, total, rstd = normalize(
            rows_of(x),
            None if residual is None else rows_of(residual),
            weight_D.contiguous(),
            eps=eps,
            zero_centered=zero_centered,
        )
    return (
        y.view(x.shape),
        x.new_empty(0) if residual is None else total.view(x.shape),
        rstd.view(x.shape[:-1]),
    )


@rms_norm_operator.register_fake
def _(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


@operator("d9d::rms_norm_backward")
def rms_norm_backward_operator(  # noqa: PLR0917 - operators take no keywords from autograd
    dy: Tensor | None,
    dtotal: Tensor | None,
    x: Tensor,
    weight_D: Tensor,
    rstd: Tensor,
    zero_centered: bool,  # noqa: FBT001
    inputs: bool,  # noqa: FBT001
    weights: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """The gradients of x, which is the sum where there is a residual, and of the weight; empty if not asked for."""
    from ._launch import differentiate  # noqa: PLC0415

    with torch.cuda.device_of(x):
        dx, dweight = differentiate(
            rows_of(torch.zeros_like(x) if dy is None else dy),
            None if dtotal is None else rows_of(dtotal),
            rows_of(x),
            weight_D.contiguous(),
            rstd.flatten(),
            zero_centered=zero_centered,
            inputs=inputs,
            weights=weights,
        )
    return only(None if dx is None else dx.view(x.shape), x), only(dweight, weight_D)


@rms_norm_backward_operator.register_fake
def _(  # noqa: PLR0917
    dy: Tensor | None,
    dtotal: Tensor | None,
    x: Tensor,
    weight_D: Tensor,
    rstd: Tensor,
    zero_centered: bool,  # noqa: FBT001
    inputs: bool,  # noqa: FBT001
    weights: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    del dy, dtotal, rstd, zero_centered
    return x.new_empty(x.shape if inputs else 0), weight_D.new_empty(weight_D.shape if weights else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight_D, _, ctx.zero_centered = inputs
    _, total, rstd = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(*([rstd] if ctx.has_residual else [total, rstd]))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total if ctx.has_residual else x, weight_D, rstd)


def _backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight_D, rstd = ctx.saved_tensors
    of_x, of_residual, of_weight = ctx.needs_input_grad[:3]
    dtotal = dtotal if ctx.has_residual else None
    inputs = of_x or of_residual
    dx, dweight = rms_norm_backward_operator(dy, dtotal, x, weight_D, rstd, ctx.zero_centered, inputs, of_weight)
    return dx if of_x else None, dx if of_residual else None, dweight if of_weight else None, None, None


rms_norm_operator.register_autograd(_backward, setup_context=_keep)
