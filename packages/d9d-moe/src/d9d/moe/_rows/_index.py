"""Slots sorted by destination, by counting.

Shapes: T tokens, K slots of a token, D destinations, N rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._operator import operator
from .._triton import has_kernels_on


class RowIndex(NamedTuple):
    """Which rows belong to which token; tensors are on the device of the destinations."""

    row_TK: Tensor
    """int64: the row of each slot, −1 where it has none."""

    count_D: Tensor
    """int32: rows of each destination."""

    rows: int
    """Their sum."""


def group_by_destination(destination_TK: Tensor, destinations: int, *, rows: int, first: int = 0) -> RowIndex:
    """Order slots by destination, within one destination by token: one row for each.

    Args:
        destination_TK: Integers; a slot that is not within first and first + destinations − 1 has no row.
        destinations: Number of destinations.
        rows: How many slots have a row; the caller knows it on the host, so that nothing here waits for the device.
        first: The first destination.
    """
    row_TK, count_D = group_operator(destination_TK, destinations, first)
    return RowIndex(row_TK, count_D, rows)


@operator("d9d::group_by_destination")
def group_operator(destination_TK: Tensor, destinations: int, first: int) -> tuple[Tensor, Tensor]:
    """Row of each slot, and rows of each destination; see `group_by_destination`."""
    if has_kernels_on(destination_TK):
        from ._launch import sort_by_counting  # noqa: PLC0415 - Triton comes with torch for CUDA only

        return sort_by_counting(destination_TK, destinations, first)
    return _stable_sort(destination_TK, destinations, first)


@group_operator.register_fake
def _(destination_TK: Tensor, destinations: int, first: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    row_TK = torch.empty_like(destination_TK, dtype=torch.int64, memory_format=torch.contiguous_format)
    return row_TK, destination_TK.new_empty(destinations, dtype=torch.int32)


def _stable_sort(destination_TK: Tensor, destinations: int, first: int) -> tuple[Tensor, Tensor]:
    """The reference."""
    flat = destination_TK.flatten().long() - first
    has_row = (flat >= 0) & (flat < destinations)
    flat = flat.where(has_row, destinations)
    count = torch.zeros(destinations + 1, dtype=torch.int32, device=flat.device)
    count.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    row = torch.empty_like(flat)
    row[flat.argsort(stable=True)] = torch.arange(len(flat), device=flat.device)
    return row.where(has_row, -1).view(destination_TK.shape), count[:destinations].clone()
