"""Triton kernels of the norm.

Shapes: N rows, D columns, L leaves.
"""

import triton
import triton.language as tl


@triton.jit
def _weight(weight_ptr, columns, D: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """In fp32, (1, BLOCK)."""
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight[None, :]


@triton.jit(do_not_specialize=["n_rows", "eps"])
def normalize_rows(  # noqa: PLR0917 - a kernel
    x_ptr,  # (N, D)
    residual_ptr,  # (N, D); not read unless HAS_RESIDUAL
    weight_ptr,  # (D)
    y_ptr,  # (N, D), contiguous
    total_ptr,  # (N, D), contiguous; not written unless HAS_RESIDUAL
    rstd_ptr,  # (N), fp32
    x_stride,
    residual_stride,
    n_rows,
    eps,
    D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program STEPS tiles of rows, one after the other."""
    columns = tl.arange(0, BLOCK)
    weight = _weight(weight_ptr, columns, D, ZERO_CENTERED)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * TILE + tl.arange(0, TILE)
        mask = (row < n_rows)[:, None] & (columns < D)[None, :]
        out = row[:, None] * D + columns[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        if HAS_RESIDUAL:
            offset = row[:, None] * residual_stride + columns[None, :]
            residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) + residual).to(x_ptr.dtype.element_ty)
            tl.store(total_ptr + out, x, mask=mask)
        x = x.to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
        tl.store(y_ptr + out, (x * rstd[:, None] * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_leaves"])
def differentiate_leaves(  # noqa: PLR0917 - a kernel
    dy_ptr,  # (N, D)
    dtotal_ptr,  # (N, D); not read unless HAS_DTOTAL
    x_ptr,  # (N, D)
    weight_ptr,  # (D)
    rstd_ptr,  # (N), fp32
    dx_ptr,  # (N, D), contiguous; not written unless INPUTS
    leaves_ptr,  # (L, D), fp32; not written unless WEIGHTS
    dy_stride,
    dtotal_stride,
    x_stride,
    n_rows,
    n_leaves,
    D: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INPUTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    LEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program LEAVES leaves of TILE · STEPS rows; each leaf is summed in the order of its tiles."""
    columns = tl.arange(0, BLOCK)
    weight = _weight(weight_ptr, columns, D, ZERO_CENTERED)
    for index in range(LEAVES):
        leaf = tl.program_id(0).to(tl.int64) * LEAVES + index
        dweight = tl.zeros((TILE, BLOCK), tl.float32)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            row = (leaf * STEPS + step) * TILE + tl.arange(0, TILE)
            mask = (row < n_rows)[:, None] & (columns < D)[None, :]
            dy = tl.load(dy_ptr + row[:, None] * dy_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)[:, None]
            normed = x * rstd
            if WEIGHTS:
                dweight += dy * normed
            if INPUTS:
                dnormed = dy * weight
                pull = tl.sum(dnormed * normed, 1)[:, None] / D
                dx = rstd * (dnormed - normed * pull)
                if HAS_DTOTAL:
                    offset = row[:, None] * dtotal_stride + columns[None, :]
                    dx += tl.load(dtotal_ptr + offset, mask=mask, other=0.0).to(tl.float32)
                out = row[:, None] * D + columns[None, :]
                tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHTS and leaf < n_leaves:
            tl.store(leaves_ptr + leaf * D + columns, tl.sum(dweight, 0), mask=columns < D)
