"""Comparing the values of two tensors of equal shape."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class Comparison:
    """How far the elements of two tensors are from each other."""

    unequal: int = 0
    """How many elements have other bits; of other dtypes, other values."""
    beyond: int = 0
    """How many are beyond the tolerance."""
    max_abs: float = 0.0
    max_rel: float = 0.0
    worst: int | None = None
    """Flat index of the first element beyond the tolerance that is farthest off."""
    worst_abs: float = 0.0
    """How far off that is."""


def compare(left: Tensor, right: Tensor, *, rtol: float, atol: float) -> Comparison:
    """Compares elements by `abs(left - right) <= atol + rtol * abs(right)`, in float64.

    There NaN equals NaN, -0.0 equals 0.0, infinity equals itself only, and NaN is infinitely far from any number.
    Where both tolerances are 0 and the dtypes are equal, bits are compared: then -0.0 differs from 0.0, and a NaN
    from one with another payload, at a distance of 0.
    """
    left, right = left.reshape(-1), right.reshape(-1)
    by_bits = left.dtype == right.dtype
    if by_bits:
        bits = _BITS[left.dtype.itemsize]
        unequal = left.contiguous().view(bits) != right.contiguous().view(bits)
        if not unequal.any():
            return Comparison()
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    gap = (a - b).abs().masked_fill(same, 0.0)
    gap = gap.masked_fill(torch.isnan(gap), torch.inf)
    size = b.abs()
    relative = (gap / size).masked_fill(gap == 0, 0.0)
    relative = relative.masked_fill(torch.isnan(relative), torch.inf)
    # compared as "not within", as a tolerance of NaN or infinity is none
    beyond = ~same & ~((gap <= atol + rtol * size) & torch.isfinite(gap))
    if by_bits and rtol == atol == 0:
        beyond = unequal
    elif not by_bits:
        unequal = ~same
    if not unequal.any():
        return Comparison()
    counts = int(unequal.sum()), int(beyond.sum())
    extremes = float(gap.max()), float(relative.max())
    if not counts[1]:
        return Comparison(*counts, *extremes)
    worst = int(gap.masked_fill(~beyond, -1.0).argmax())
    return Comparison(*counts, *extremes, worst, float(gap[worst]))
