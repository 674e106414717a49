"""Launches of the norm's kernels.

Shapes: N rows, D columns, L leaves.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from .._partial_sums import fold, leaf_length
from ._kernel import differentiate_leaves, normalize_rows


@attrs.frozen
class Geometry:
    """How work is given to programs; the bits of a weight's gradient do not depend on it."""

    steps: int
    """Tiles that a program normalizes one after the other."""
    leaves: int
    """Leaves that a program differentiates."""
    forward_warps: int
    """Warps of a program, and below."""
    backward_warps: int
    stages: int
    """Stages of the pipeline of loads."""

    @classmethod
    def of(cls, columns: int) -> "Geometry":
        """The fastest that was found on an H200, by tools/bench_attention.py."""
        warps = min(16, max(4, columns // 512))
        return cls(steps=1, leaves=1, forward_warps=warps, backward_warps=warps, stages=1)


def normalize(
    x_ND: Tensor,
    residual_ND: Tensor | None,
    weight_D: Tensor,
    *,
    eps: float,
    zero_centered: bool,
    geometry: Geometry | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows, the sum (x itself without residual), and 1 / root mean square of each row, fp32 (N,)."""
    rows, columns = x_ND.shape
    geometry = geometry or Geometry.of(columns)
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    total_ND = x_ND if residual_ND is None else torch.empty_like(y_ND)
    rstd_N = x_ND.new_empty(rows, dtype=torch.float32)
    if x_ND.numel():
        tile, block = _tile(columns)
        kernel: Any = normalize_rows[(-(-rows // (tile * geometry.steps)),)]
        kernel(
            x_ND,
            x_ND if residual_ND is None else residual_ND,
            weight_D,
            y_ND,
            total_ND,
            rstd_N,
            x_ND.stride(0),
            0 if residual_ND is None else residual_ND.stride(0),
            rows,
            eps,
            D=columns,
            HAS_RESIDUAL=residual_ND is not None,
            ZERO_CENTERED=zero_centered,
            TILE=tile,
            STEPS=geometry.steps,
            BLOCK=block,
            STAGES=geometry.stages,
            num_warps=geometry.forward_warps,
        )
    return y_ND, total_ND, rstd_N


def differentiate(
    dy_ND: Tensor,
    dtotal_ND: Tensor | None,
    x_ND: Tensor,
    weight_D: Tensor,
    rstd_N: Tensor,
    *,
    zero_centered: bool,
    inputs: bool,
    weights: bool,
    geometry: Geometry | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x (with that of the sum) and of the weight, those that are asked for."""
    rows, columns = x_ND.shape
    geometry = geometry or Geometry.of(columns)
    dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if inputs else None
    if not x_ND.numel():
        return dx_ND, torch.zeros_like(weight_D) if weights else None
    tile, block = _tile(columns)
    length = max(tile, leaf_length(rows))
    leaves = -(-rows // length)
    leaves_L1D = x_ND.new_empty((leaves, 1, columns) if weights else 0, dtype=torch.float32)
    kernel: Any = differentiate_leaves[(-(-leaves // geometry.leaves),)]
    kernel(
        dy_ND,
        dy_ND if dtotal_ND is None else dtotal_ND,
        x_ND,
        weight_D,
        rstd_N,
        x_ND if dx_ND is None else dx_ND,
        leaves_L1D,
        dy_ND.stride(0),
        0 if dtotal_ND is None else dtotal_ND.stride(0),
        x_ND.stride(0),
        rows,
        leaves,
        D=columns,
        HAS_DTOTAL=dtotal_ND is not None,
        ZERO_CENTERED=zero_centered,
        INPUTS=inputs,
        WEIGHTS=weights,
        TILE=tile,
        STEPS=length // tile,
        LEAVES=geometry.leaves,
        BLOCK=block,
        STAGES=geometry.stages,
        num_warps=geometry.backward_warps,
    )
    return dx_ND, fold(leaves_L1D, weight_D.dtype)[0] if weights else None


def _tile(columns: int) -> tuple[int, int]:
    """Rows at a time, by shape alone: their sums are part of the order of additions; and columns, a power of 2."""
    block = 1 << max(4, (columns - 1).bit_length())
    return max(1, min(64, 2048 // block)), block
