"""Triton kernel of the sum over leaves.

Shapes: L leaves, M sums side by side, C columns.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_leaves"])
def fold_leaves(  # noqa: PLR0917 - a kernel
    leaves_ptr,  # (L, M, C), fp32
    first_ptr,  # (C)
    second_ptr,  # (C); not written unless M is 2
    n_leaves,
    C: tl.constexpr,
    SUMS: tl.constexpr,
    MAX_LEAVES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program some columns of one sum; always as many additions as there may be leaves, of zeros where none is."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    inside = columns < C
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, MAX_LEAVES, ROWS):
        leaf = start + tl.arange(0, ROWS)
        offset = (leaf * SUMS + which).to(tl.int64)[:, None] * C + columns[None, :]
        total += tl.load(leaves_ptr + offset, mask=(leaf < n_leaves)[:, None] & inside[None, :], other=0.0)
    found = tl.sum(total, 0)
    if which == 0:
        tl.store(first_ptr + columns, found.to(first_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(second_ptr + columns, found.to(second_ptr.dtype.element_ty), mask=inside)
