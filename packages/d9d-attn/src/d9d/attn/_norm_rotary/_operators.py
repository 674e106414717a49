"""Norm and rotation by kernels, as operators of torch, and their gradients.

Shapes: B batch, S positions, H query heads, G key heads, D head dim, R rotary dim.
"""

from typing import Any

import torch
from torch import Tensor

from .._kernel_choice import only
from .._operator import operator


@operator("d9d::norm_and_rotate")
def norm_and_rotate_operator(  # noqa: PLR0917 - operators take no keywords from autograd
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    zero_centered: bool,  # noqa: FBT001
    interleaved: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """See `norm_and_rotate`; weights have one dtype."""
    from ._launch import Flavour, turn  # noqa: PLC0415 - imports Triton, which takes a second

    flavour = Flavour(eps=eps, zero_centered=zero_centered, interleaved=interleaved)
    with torch.cuda.device_of(q_BSHD):  # Triton launches on the current device
        return turn(q_BSHD, k_BSGD, cos_BSR, sin_BSR, _dense(q_weight_D), _dense(k_weight_D), flavour)


@norm_and_rotate_operator.register_fake
def _(q_BSHD: Tensor, k_BSGD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q_BSHD.new_empty(q_BSHD.shape), k_BSGD.new_empty(k_BSGD.shape)


@operator("d9d::norm_and_rotate_backward")
def norm_and_rotate_backward_operator(  # noqa: PLR0917
    dq_out_BSHD: Tensor,
    dk_out_BSGD: Tensor,
    q_BSHD: Tensor | None,
    k_BSGD: Tensor | None,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    zero_centered: bool,  # noqa: FBT001
    interleaved: bool,  # noqa: FBT001
    inputs: bool,  # noqa: FBT001
    weights: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and weights, empty if not asked for; a rotation alone reads no q and k."""
    from ._launch import Flavour, differentiate, turn  # noqa: PLC0415

    flavour = Flavour(eps=eps, zero_centered=zero_centered, interleaved=interleaved)
    of_inputs, of_weights = None, None
    with torch.cuda.device_of(dq_out_BSHD):
        if q_BSHD is None or k_BSGD is None:
            of_inputs = turn(dq_out_BSHD, dk_out_BSGD, cos_BSR, sin_BSR, None, None, flavour, backwards=True)
        else:
            of_inputs, of_weights = differentiate(
                dq_out_BSHD,
                dk_out_BSGD,
                q_BSHD,
                k_BSGD,
                cos_BSR,
                sin_BSR,
                _dense(q_weight_D),
                _dense(k_weight_D),
                flavour,
                inputs=inputs,
                weights=weights,
            )
    dq, dk = of_inputs or (None, None)
    dq_weight, dk_weight = of_weights or (None, None)
    weight = q_weight_D if q_weight_D is not None else k_weight_D
    like = dq_out_BSHD if weight is None else weight
    return only(dq, dq_out_BSHD), only(dk, dq_out_BSHD), only(dq_weight, like), only(dk_weight, like)


@norm_and_rotate_backward_operator.register_fake
def _(  # noqa: PLR0917
    dq_out_BSHD: Tensor,
    dk_out_BSGD: Tensor,
    q_BSHD: Tensor | None,
    k_BSGD: Tensor | None,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    zero_centered: bool,  # noqa: FBT001
    interleaved: bool,  # noqa: FBT001
    inputs: bool,  # noqa: FBT001
    weights: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del k_BSGD, cos_BSR, sin_BSR, eps, zero_centered, interleaved
    inputs = inputs or q_BSHD is None
    weight = q_weight_D if q_weight_D is not None else k_weight_D
    like = dq_out_BSHD if weight is None else weight
    size = like.shape if weights and weight is not None else 0
    return (
        dq_out_BSHD.new_empty(dq_out_BSHD.shape if inputs else 0),
        dk_out_BSGD.new_empty(dk_out_BSGD.shape if inputs else 0),
        like.new_empty(size),
        like.new_empty(size),
    )


def _dense(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    del output
    q, k, *others = inputs[:6]
    has_norm = inputs[4] is not None or inputs[5] is not None
    ctx.plain = inputs[6:]
    ctx.save_for_backward(q if has_norm else None, k if has_norm else None, *others)


def _backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    asked = needs[0] or needs[1], needs[4] or needs[5]
    made = norm_and_rotate_backward_operator(dq_out, dk_out, *ctx.saved_tensors, *ctx.plain, *asked)
    dq, dk, dq_weight, dk_weight = (
        gradient if needed else None for gradient, needed in zip(made, (*needs[:2], *needs[4:6]))
    )
    return dq, dk, None, None, dq_weight, dk_weight, None, None, None


norm_and_rotate_operator.register_autograd(_backward, setup_context=_keep)
