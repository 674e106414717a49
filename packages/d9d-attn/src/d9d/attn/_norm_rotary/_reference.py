"""Norm and rotation in plain torch: the oracle, and the way of every device without a kernel.

Shapes: B batch, S positions, H heads, D head dim, R rotary dim, P = R / 2 pairs.
"""

import torch
from torch import Tensor


def norm_and_rotate_one(
    x_BSHD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    weight_D: Tensor | None,
    *,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> Tensor:
    """Of q or of k; computed in fp32 or wider and rounded once, to the dtype of x."""
    wide = torch.promote_types(x_BSHD.dtype, torch.float32)
    x = x_BSHD.to(wide)
    if weight_D is not None:
        wide = torch.promote_types(wide, weight_D.dtype)
        x = x.to(wide)
        scale = 1 + weight_D.to(wide) if zero_centered else weight_D.to(wide)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale
    rotary_dim = cos_BSR.shape[-1]
    cos_BS1P, sin_BS1P = (table[:, :, None, : rotary_dim // 2] for table in (cos_BSR, sin_BSR))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = first * cos_BS1P - second * sin_BS1P, second * cos_BS1P + first * sin_BS1P
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned, rest], dim=-1).to(x_BSHD.dtype) if rest.shape[-1] else turned.to(x_BSHD.dtype)
