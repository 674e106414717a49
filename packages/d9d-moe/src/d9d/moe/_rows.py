"""Rows grouped by destination, and the two moves between tokens and rows.

A token goes to several destinations (experts, or ranks) and has one row at each. ``gather_rows`` copies tokens to their
rows, ``sum_rows`` adds the rows of each token; each is the other's gradient. Sums accumulate in fp32 or wider, in the
order of a token's destinations: no atomics, the same bits every time.

Shapes: T tokens, K slots of a token, N rows, H hidden size.
"""

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@attrs.frozen
class RowIndex:
    """Which rows belong to which token; all on the device of the destinations."""

    slot_N: Tensor
    """int64: for each row, in the order of destinations, its place in the flattened (T, K) slots."""

    token_N: Tensor
    """int64: for each row its token."""

    row_N: Tensor
    """int64: the rows, in the order of tokens."""

    start_T: Tensor
    """int64, (T + 1): where the rows of each token start in row_N."""

    count_D: Tensor
    """int32: rows of each destination."""


@torch.no_grad()
def group_by_destination(destination_TK: Tensor, destinations: int, *, rows: int) -> RowIndex:
    """Order slots by destination, within one destination by token.

    Args:
        destination_TK: Integers in [0, destinations]; the value ``destinations`` marks a slot that has no row.
        destinations: Number of destinations.
        rows: How many slots have a row; the caller knows it on the host, so that nothing here waits for the device.
    """
    flat = destination_TK.flatten()
    slots = destination_TK.shape[1]
    slot_N = flat.argsort(stable=True)[:rows]
    count = torch.zeros(destinations + 1, dtype=torch.int32, device=flat.device)
    count.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))

    has_row_TK = destination_TK != destinations
    start_T = F.pad(has_row_TK.sum(1).cumsum(0), (1, 0))
    place_among_rows = has_row_TK.flatten().cumsum(0) - 1
    row_N = torch.empty_like(slot_N)
    row_N[place_among_rows[slot_N]] = torch.arange(rows, device=flat.device)
    return RowIndex(slot_N, slot_N // slots, row_N, start_T, count[:destinations])


def gather_rows(x_TH: Tensor, index: RowIndex) -> Tensor:
    """Copy each token to its rows: (N, H)."""
    rows_NH: Tensor = _GatherRows.apply(x_TH, index.token_N, index.row_N, index.start_T)
    return rows_NH


def sum_rows(y_NH: Tensor, index: RowIndex) -> Tensor:
    """Add the rows of each token: (T, H), zeros for a token without rows."""
    tokens_TH: Tensor = _SumRows.apply(y_NH, index.token_N, index.row_N, index.start_T)
    return tokens_TH


def _sum_by_token(y_NH: Tensor, row_N: Tensor, start_T: Tensor) -> Tensor:
    if y_NH.shape[0] == 0:
        return y_NH.new_zeros(start_T.shape[0] - 1, y_NH.shape[1])
    # An embedding bag is this very sum in one kernel: it accumulates in fp32 and materializes nothing.
    return F.embedding_bag(row_N, y_NH.contiguous(), start_T, mode="sum", include_last_offset=True)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_N: Tensor, row_N: Tensor, start_T: Tensor) -> Tensor:
        ctx.save_for_backward(row_N, start_T)
        return x_TH.index_select(0, token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_by_token(grad_NH, *ctx.saved_tensors), None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, token_N: Tensor, row_N: Tensor, start_T: Tensor) -> Tensor:
        ctx.save_for_backward(token_N)
        return _sum_by_token(y_NH, row_N, start_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None, None]:
        (token_N,) = ctx.saved_tensors
        return grad_TH.index_select(0, token_N), None, None, None
