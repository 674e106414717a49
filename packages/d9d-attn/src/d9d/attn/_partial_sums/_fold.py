"""How many tokens a leaf has, and the sum over leaves.

Shapes: L leaves, M sums side by side (one or two), C columns.
"""

from typing import Any

import torch
from torch import Tensor

MAX_LEAVES = 512
"""Enough for all multiprocessors, and few enough for leaves to be cheap to write: 2 % of the traffic of a norm."""

_SHORTEST = 8
_COLUMNS, _ROWS = 32, 64


def leaf_length(tokens: int) -> int:
    """Tokens in each leaf but the last: a power of 2, so that kernels are compiled for few lengths."""
    return max(_SHORTEST, 1 << (-(-tokens // MAX_LEAVES) - 1).bit_length())


def fold(leaves_LMC: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Sum at most MAX_LEAVES leaves: M tensors (C,)."""
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
        MAX_LEAVES=MAX_LEAVES,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return made
