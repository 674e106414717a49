"""Launches of the norm's kernels.

Shapes: N rows, D columns, L leaves.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from .._partial_sums import fold, leaf_length
from ._kernel import differentiate_leaves, normalize_rows

_MAX_LEAVES = 512
"""Enough for all multiprocessors, and few enough to be cheap: 2 % of the traffic of 32,768 rows."""

_MAX_BUFFERS = 160 << 10
"""Bytes of shared memory that loads in flight may take."""


@attrs.frozen(kw_only=True)
class Geometry:
    """How work is given to programs. The bits of a weight's gradient do not depend on steps, leaves and stages."""

    steps: int = 1
    """Tiles that a program normalizes one after the other."""
    leaves: int = 1
    """Leaves that a program differentiates."""
    forward_warps: int
    """Warps of a program, and below."""
    backward_warps: int
    stages: int
    """Stages of the pipeline of loads of backward."""

    @classmethod
    def of(cls, columns: int, bytes_of_row: int) -> "Geometry":
        """The fastest of some 70 that were tried on an H200, for rows of 2048 and 4096, and what scales from them.

        Args:
            columns: Of a row.
            bytes_of_row: That backward loads.
        """
        return cls(
            forward_warps=min(16, max(4, columns // 1024)),
            backward_warps=4 if columns <= 2048 else 16 if columns <= 8192 else 32,
            stages=3 if 3 * bytes_of_row <= _MAX_BUFFERS else 1,
        )


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
    geometry = geometry or Geometry.of(columns, 0)
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
    loaded = [x for x in (dy_ND, dtotal_ND, x_ND) if x is not None]
    geometry = geometry or Geometry.of(columns, columns * sum(x.element_size() for x in loaded))
    dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if inputs else None
    if not x_ND.numel():
        return dx_ND, torch.zeros_like(weight_D) if weights else None
    tile, block = _tile(columns)
    length = max(tile, leaf_length(rows, _MAX_LEAVES))
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
    return dx_ND, fold(leaves_L1D, weight_D.dtype, _MAX_LEAVES)[0] if weights else None


def _tile(columns: int) -> tuple[int, int]:
    """Rows at a time, by shape alone: their sums are part of the order of additions; and columns, a power of 2."""
    block = 1 << max(4, (columns - 1).bit_length())
    return max(1, min(64, 2048 // block)), block
