"""How many tokens a leaf has, and the sum over leaves.

Shapes: L leaves, M sums side by side (one or two), C columns.
"""

from typing import Any

import torch
from torch import Tensor

SHORTEST_LEAF = 8
"""Tokens."""

_COLUMNS, _ROWS = 32, 64


def leaf_length(tokens: int, max_leaves: int) -> int:
    """Tokens in each leaf but the last: a power of 2, so that kernels are compiled for few lengths."""
    return max(SHORTEST_LEAF, 1 << (-(-tokens // max_leaves) - 1).bit_length())


def fold(leaves_LMC: Tensor, dtype: torch.dtype, max_leaves: int) -> list[Tensor]:
    """Sum at most so many leaves, in an order that depends on that number and on no other: M tensors (C,)."""
    from ._kernel import fold_leaves  # noqa: PLC0415 - takes a second

    leaves, sums, columns = leaves_LMC.shape
    made = [leaves_LMC.new_empty(columns, dtype=dtype) for _ in range(sums)]
    kernel: Any = fold_leaves[(-(-columns // _COLUMNS), sums)]
    # Other numbers of rows, columns or warps would be another order: they are no options.
    kernel(
        leaves_LMC,
        made[0],
        made[-1],
        leaves,
        C=columns,
        SUMS=sums,
        MAX_LEAVES=max_leaves,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return made
