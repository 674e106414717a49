"""Launches of the kernels of norm and rotation.

Shapes: B batch, S positions, H heads of q or k, D head dim, R rotary dim.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from .._partial_sums import SHORTEST_LEAF, fold, leaf_length
from ._kernel import differentiate_leaves, turn_tokens

_FORWARD_TILE, _BACKWARD_TILE = 2048, 4096
"""Elements of a tile at most, by shape alone: it is part of the order of additions."""

_MAX_LEAVES = 1024


@attrs.frozen
class Geometry:
    """How work is given to programs. The bits of weights' gradients do not depend on the first two."""

    steps: int = 1
    """Tiles that a program turns one after the other."""
    leaves: int = 1
    """That a program differentiates."""
    forward_warps: int = 2
    """Warps of a program, and below."""
    backward_warps: int = 4
    stages: int = 3
    """Stages of the pipeline of loads of backward."""


@attrs.frozen(kw_only=True)
class Flavour:
    """What is computed."""

    eps: float
    """Added to the mean square."""
    zero_centered: bool
    """Whether 1 + weight stands for the weight."""
    interleaved: bool
    """Whether pairs are neighbours."""


def turn(  # noqa: PLR0917 - operands in the order of the operator
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    flavour: Flavour,
    *,
    backwards: bool = False,
    geometry: Geometry = Geometry(),
) -> tuple[Tensor, Tensor]:
    """Norm where there is a weight, then rotation, by minus the angles if backwards; contiguous."""
    q, k = _with_contiguous_heads(q_BSHD), _with_contiguous_heads(k_BSHD)
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    if q.numel() or k.numel():
        cos, sin = _tables(cos_BSR, sin_BSR, q)
        tokens = q.shape[0] * q.shape[1]
        sizes = _sizes(q, k, cos, _FORWARD_TILE)
        q_programs, k_programs = (
            -(-tokens // (geometry.steps * sizes[at_once])) for at_once in ("Q_AT_ONCE", "K_AT_ONCE")
        )
        kernel: Any = turn_tokens[(q_programs + k_programs,)]
        kernel(
            q,
            k,
            cos,
            sin,
            q if q_weight_D is None else q_weight_D,
            k if k_weight_D is None else k_weight_D,
            q_out,
            k_out,
            *q.stride()[:3],
            *k.stride()[:3],
            *cos.stride()[:2],
            q_programs,
            tokens,
            q.shape[1],
            flavour.eps,
            Q_NORM=q_weight_D is not None,
            K_NORM=k_weight_D is not None,
            ZERO_CENTERED=flavour.zero_centered,
            INTERLEAVED=flavour.interleaved,
            BACKWARDS=backwards,
            STEPS=geometry.steps,
            num_warps=geometry.forward_warps,
            **sizes,
        )
    return q_out, k_out


def differentiate(  # noqa: PLR0917
    dq_out_BSHD: Tensor,
    dk_out_BSHD: Tensor,
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    flavour: Flavour,
    *,
    inputs: bool,
    weights: bool,
    geometry: Geometry = Geometry(),
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """The gradients of q and k, and of the weights, those that are asked for; one weight at least."""
    weight = q_weight_D if q_weight_D is not None else k_weight_D
    assert weight is not None
    q, k, dq_out, dk_out = map(_with_contiguous_heads, (q_BSHD, k_BSHD, dq_out_BSHD, dk_out_BSHD))
    dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) if inputs else x for x in (q, k))
    of_inputs = (dq, dk) if inputs else None
    head_dim = q.shape[3]
    if not q.numel() and not k.numel():
        return of_inputs, (torch.zeros_like(weight), torch.zeros_like(weight)) if weights else None
    cos, sin = _tables(cos_BSR, sin_BSR, q)
    tokens = q.shape[0] * q.shape[1]
    length = leaf_length(tokens, _MAX_LEAVES)
    leaves = -(-tokens // length)
    leaves_L2D = q.new_empty((leaves, 2, head_dim) if weights else 0, dtype=torch.float32)
    programs = -(-leaves // geometry.leaves)
    kernel: Any = differentiate_leaves[(2 * programs,)]
    kernel(
        dq_out,
        dk_out,
        q,
        k,
        cos,
        sin,
        q if q_weight_D is None else q_weight_D,
        k if k_weight_D is None else k_weight_D,
        dq,
        dk,
        leaves_L2D,
        *dq_out.stride()[:3],
        *dk_out.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *cos.stride()[:2],
        programs,
        tokens,
        q.shape[1],
        flavour.eps,
        Q_NORM=q_weight_D is not None,
        K_NORM=k_weight_D is not None,
        ZERO_CENTERED=flavour.zero_centered,
        INTERLEAVED=flavour.interleaved,
        INPUTS=inputs,
        WEIGHTS=weights,
        TOKENS=length,
        LEAVES=geometry.leaves,
        STAGES=geometry.stages,
        num_warps=geometry.backward_warps,
        **_sizes(q, k, cos, _BACKWARD_TILE),
    )
    if not weights:
        return of_inputs, None
    of_q, of_k = fold(leaves_L2D, weight.dtype, _MAX_LEAVES)
    return of_inputs, (of_q, of_k)


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(cos: Tensor, sin: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """With the batch of q, and with the same strides."""
    cos, sin = (x.expand(q.shape[0], q.shape[1], x.shape[-1]) for x in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin


def _sizes(q: Tensor, k: Tensor, cos: Tensor, tile: int) -> dict[str, int]:
    """The sizes that kernels are compiled for."""
    head_dim, rotary_dim = q.shape[3], cos.shape[2]
    rows = max(1, tile // _power_of_2(head_dim))
    q_heads, k_heads = (min(rows, _power_of_2(x.shape[2])) for x in (q, k))
    return {
        "HQ": q.shape[2],
        "HK": k.shape[2],
        "D": head_dim,
        "R": rotary_dim,
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "Q_AT_ONCE": min(rows // q_heads, SHORTEST_LEAF),
        "K_AT_ONCE": min(rows // k_heads, SHORTEST_LEAF),
        "P": _power_of_2(rotary_dim // 2),
        "E": _power_of_2(head_dim - rotary_dim),
    }


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
