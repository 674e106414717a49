"""Launches of the kernels for rows.

Shapes: T tokens, K slots of a token, N rows, H hidden size, D destinations.
"""

from typing import Any

import torch
from torch import Tensor

from .._triton import on_its_device
from ._kernel import (
    copy_to_rows,
    count_destinations,
    mark_ranks,
    pack_to_rows,
    place_slots,
    sum_to_tokens,
    weigh_to_rows,
)

SLOTS_OF_A_BLOCK = 128
"""A program compares so many slots with each other: 128² pairs are 128 registers a thread."""
TOKENS_OF_A_BLOCK = 64
MAX_BLOCK = 2048


@on_its_device
def sort_by_counting(destination_TK: Tensor, destinations: int, first: int) -> tuple[Tensor, Tensor]:
    """Row of each slot and rows of each destination; see `group_by_destination`."""
    destination_TK = destination_TK.contiguous()
    slots = destination_TK.numel()
    row_TK = torch.empty(destination_TK.shape, dtype=torch.int64, device=destination_TK.device)
    if slots == 0:
        return row_TK, torch.zeros(destinations, dtype=torch.int32, device=row_TK.device)
    blocks = -(-slots // SLOTS_OF_A_BLOCK)
    count_DB = torch.empty((destinations, blocks), dtype=torch.int32, device=row_TK.device)
    count: Any = count_destinations[(blocks,)]
    count(
        destination_TK,
        count_DB,
        first,
        slots,
        blocks,
        DESTINATIONS=destinations,
        BLOCK=SLOTS_OF_A_BLOCK,
        TILE=min(64, _power_of_2(destinations)),
    )
    end_DB = count_DB.flatten().cumsum(0, dtype=torch.int32)
    place: Any = place_slots[(blocks,)]
    place(
        destination_TK,
        end_DB,
        count_DB,
        row_TK,
        first,
        slots,
        blocks,
        DESTINATIONS=destinations,
        BLOCK=SLOTS_OF_A_BLOCK,
    )
    return row_TK, count_DB.sum(1, dtype=torch.int32)


@on_its_device
def ranks_of_tokens(ids_TK: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """See the function of this name."""
    ids_TK = ids_TK.contiguous()
    tokens, slots = ids_TK.shape
    rank_TP = torch.empty((tokens, ranks), dtype=torch.int32, device=ids_TK.device)
    blocks = -(-tokens // TOKENS_OF_A_BLOCK)
    count_P2B = torch.empty((ranks, 2, blocks), dtype=torch.int32, device=ids_TK.device)
    if ids_TK.numel() > 0:
        kernel: Any = mark_ranks[(blocks,)]
        kernel(
            ids_TK,
            rank_TP,
            count_P2B,
            tokens,
            blocks,
            experts,
            SLOTS=slots,
            RANKS=ranks,
            BLOCK=TOKENS_OF_A_BLOCK,
            WIDTH=1 << (slots - 1).bit_length(),
        )
    return rank_TP, count_P2B.sum(2)


@on_its_device
def gather(x_TH: Tensor, probs_TK: Tensor | None, row_TK: Tensor, out_NH: Tensor) -> Tensor | None:
    """Copy tokens to their rows in ``out_NH``, whose rows may lie apart; give the probabilities of the rows (N,)."""
    tokens, size = x_TH.shape
    out_probs_N = None if probs_TK is None else probs_TK.new_empty(out_NH.shape[0])
    if tokens * size == 0 or out_NH.shape[0] == 0:
        return out_probs_N
    x_TH = _with_dense_rows(x_TH)
    block = _block(size)
    kernel: Any = copy_to_rows[(tokens, -(-size // block))]
    kernel(
        x_TH,
        row_TK if probs_TK is None else probs_TK.contiguous(),
        row_TK,
        out_NH,
        row_TK if out_probs_N is None else out_probs_N,
        x_TH.stride(0),
        out_NH.stride(0),
        SLOTS=row_TK.shape[1],
        SIZE=size,
        HAS_PROBS=probs_TK is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out_probs_N


@on_its_device
def pack(
    x_TH: Tensor, probs_TK: Tensor, ids_TK: Tensor, row_TP: Tensor, *, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Copy tokens with all their numbers to their rows in three tensors (N, H), (N, K), (N, K), int32."""
    out_NH, out_probs_NK, out_ids_NK = into
    tokens, size = x_TH.shape
    slots = ids_TK.shape[1]
    if tokens == 0 or out_NH.shape[0] == 0:
        return
    x_TH = _with_dense_rows(x_TH)
    block = _block(size)
    kernel: Any = pack_to_rows[(tokens, max(1, -(-size // block)))]
    kernel(
        x_TH,
        probs_TK.contiguous(),
        ids_TK.contiguous(),
        row_TP,
        out_NH,
        out_probs_NK,
        out_ids_NK,
        x_TH.stride(0),
        out_NH.stride(0),
        out_probs_NK.stride(0),
        out_ids_NK.stride(0),
        RANKS=row_TP.shape[1],
        SIZE=size,
        SLOTS=slots,
        BLOCK=block,
        WIDTH=1 << (slots - 1).bit_length(),
        num_warps=_warps(block),
    )


@on_its_device
def add_up(
    y_NH: Tensor,
    weights_TK: Tensor | None,
    probs_N: Tensor | None,
    row_TK: Tensor,
    *,
    into: tuple[Tensor, Tensor | None],
) -> None:
    """Add the rows of each token (T, H); and bring numbers of the rows to their slots (T, K), 0 where there is none.

    Rows of both tensors may lie apart.
    """
    out_TH, out_probs_TK = into
    tokens, slots = row_TK.shape
    size = y_NH.shape[1]
    if tokens * size == 0:
        return
    y_NH = _with_dense_rows(y_NH)
    block = _block(size)
    kernel: Any = sum_to_tokens[(tokens, -(-size // block))]
    kernel(
        y_NH,
        row_TK if weights_TK is None else weights_TK.contiguous(),
        row_TK if probs_N is None else probs_N.contiguous(),
        row_TK,
        out_TH,
        row_TK if out_probs_TK is None else out_probs_TK,
        y_NH.stride(0),
        out_TH.stride(0),
        0 if out_probs_TK is None else out_probs_TK.stride(0),
        SLOTS=slots,
        SIZE=size,
        HAS_WEIGHTS=weights_TK is not None,
        HAS_PROBS=probs_N is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )


@on_its_device
def weigh(grad_TH: Tensor, y_NH: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights of a weighted sum."""
    grad_y_NH = torch.empty_like(y_NH, memory_format=torch.contiguous_format)
    grad_weights_TK = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    if weights_TK.numel() == 0:
        return grad_y_NH, grad_weights_TK
    grad_TH, y_NH = _with_dense_rows(grad_TH), _with_dense_rows(y_NH)
    size = y_NH.shape[1]
    block = _block(size)
    kernel: Any = weigh_to_rows[(weights_TK.numel(),)]
    kernel(
        grad_TH,
        y_NH,
        weights_TK.contiguous(),
        row_TK,
        grad_y_NH,
        grad_weights_TK,
        grad_TH.stride(0),
        y_NH.stride(0),
        SLOTS=row_TK.shape[1],
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return grad_y_NH, grad_weights_TK


def _with_dense_rows(x: Tensor) -> Tensor:
    """Give each row unit stride; rows may lie apart, as those of a packed buffer do."""
    return x if x.stride(1) == 1 else x.contiguous()


def _power_of_2(size: int) -> int:
    return 1 << max(4, (size - 1).bit_length())


def _block(size: int) -> int:
    return min(MAX_BLOCK, _power_of_2(size))


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
