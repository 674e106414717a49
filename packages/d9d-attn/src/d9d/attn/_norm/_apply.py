"""The public functions, and which way they go."""

import functools

import torch
from torch import Tensor

from .._kernel_choice import fits, splits
from .._weight_branch import Gradients, branched
from ._operators import rms_norm_backward_operator, rms_norm_operator
from ._reference import plain_rms_norm

MAX_COLUMNS = 32_768
"""A kernel holds a whole row; longer ones go the plain way."""


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, zero_centered: bool = False) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dim; with zero_centered ``1 + weight`` stands for the weight.

    Computed in fp32 or wider and rounded once, to the dtype of x. On CUDA one Triton kernel each way, whose weight
    gradient is the same from run to run, for rows of at most 32,768 in dtypes of at most 32 bits; else plain torch.

    Args:
        x: (..., D).
        weight: (D,), of any dtype.
        eps: Added to the mean square.
        zero_centered: Multiply by ``1 + weight``.

    Raises:
        ValueError: Shapes do not go together.
    """
    _check(x, weight)
    if not (fits(x, weight) and len(weight) <= MAX_COLUMNS):
        return plain_rms_norm(x, weight, eps=eps, zero_centered=zero_centered)
    if not splits((x,), (weight,)):
        made: Tensor = rms_norm_operator(x, None, weight, eps, zero_centered)[0]
        return made
    with torch.no_grad():
        y, _, rstd = rms_norm_operator(x, None, weight, eps, zero_centered)
    return branched(
        [y],
        inputs=[x],
        weights=[weight],
        saved=[x, weight, rstd],
        backward=functools.partial(_backward, zero_centered=zero_centered),
        read_by_weights=1,
    )[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Add two tensors of one shape and normalize their sum, as it is once rounded; see `rms_norm`.

    Returns:
        The normed sum, and the sum.

    Raises:
        ValueError: Shapes do not go together.
    """
    _check(x, weight)
    if x.shape != residual.shape:
        raise ValueError(
            f"x has the shape {tuple(x.shape)!r} and residual {tuple(residual.shape)!r}; they must be the same"
        )
    if not (fits(x, residual, weight) and x.dtype == residual.dtype and len(weight) <= MAX_COLUMNS):
        total = x + residual
        return plain_rms_norm(total, weight, eps=eps, zero_centered=zero_centered), total
    if not splits((x, residual), (weight,)):
        y, total, _ = rms_norm_operator(x, residual, weight, eps, zero_centered)
        return y, total
    with torch.no_grad():
        y, total, rstd = rms_norm_operator(x, residual, weight, eps, zero_centered)
    y, total = branched(
        [y, total],
        inputs=[x, residual],
        weights=[weight],
        saved=[total, weight, rstd],
        backward=functools.partial(_add_backward, zero_centered=zero_centered),
        read_by_weights=1,
    )
    return y, total


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.ndim != 1 or x.shape[-1:] != weight.shape:
        raise ValueError(
            f"weight has the shape {tuple(weight.shape)!r} and x {tuple(x.shape)!r}; it must be as long as rows of x"
        )


def _backward(
    upstream: Gradients, saved: tuple[Tensor, ...], *, inputs: bool, weights: bool, zero_centered: bool
) -> tuple[Gradients, Gradients]:
    """See `Backward`."""
    (dx, _), of_weights = _add_backward(
        (upstream[0], None), saved, inputs=inputs, weights=weights, zero_centered=zero_centered
    )
    return (dx,), of_weights


def _add_backward(
    upstream: Gradients, saved: tuple[Tensor, ...], *, inputs: bool, weights: bool, zero_centered: bool
) -> tuple[Gradients, Gradients]:
    """See `Backward`."""
    dtotal = upstream[1] if inputs else None
    dx, dweight = rms_norm_backward_operator(upstream[0], dtotal, *saved, zero_centered, inputs, weights)
    return (dx, dx), (dweight,)
