"""Triton kernels that sort slots by destination and move rows.

Shapes: T tokens, K slots of a token, L = T·K slots, N rows, H hidden size, P ranks, D destinations, B blocks of
slots or tokens.
"""

import triton
import triton.language as tl


@triton.jit
def mark_ranks(  # noqa: PLR0917 - a kernel
    ids_ptr,  # (T, K)
    rank_ptr,  # (T, P), int32, out
    count_ptr,  # (P, 2, B), int32, out: tokens, and slots
    tokens,
    blocks,
    experts,  # of a rank
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """To which ranks a token goes, and how many tokens and slots of a block go to each."""
    block = tl.program_id(0)
    token = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, WIDTH)[None, :]
    is_slot = (token < tokens)[:, None] & (slot < SLOTS)
    ids = tl.load(ids_ptr + token[:, None] * SLOTS + slot, mask=is_slot, other=0)
    rank_of_slot = tl.where(is_slot, ids // experts, RANKS)
    for rank in range(RANKS):
        slots = tl.sum((rank_of_slot == rank).to(tl.int32), 1)
        goes = slots > 0
        tl.store(rank_ptr + token * RANKS + rank, tl.where(goes, rank, RANKS), mask=token < tokens)
        cell = rank * 2 * blocks + block
        tl.store(count_ptr + cell, tl.sum(goes.to(tl.int32), 0))
        tl.store(count_ptr + cell + blocks, tl.sum(slots, 0))


@triton.jit
def count_destinations(  # noqa: PLR0917 - a kernel
    destination_ptr,  # (L)
    count_ptr,  # (D, B), int32
    first,
    slots,
    blocks,
    DESTINATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many slots of a block go to each destination."""
    block = tl.program_id(0)
    slot = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    destination = tl.load(destination_ptr + slot, mask=slot < slots, other=first - 1) - first
    for start in range(0, DESTINATIONS, TILE):
        tile = start + tl.arange(0, TILE)
        count = tl.sum((destination[:, None] == tile[None, :]).to(tl.int32), 0)
        tl.store(count_ptr + tile.to(tl.int64) * blocks + block, count, mask=tile < DESTINATIONS)


@triton.jit
def place_slots(  # noqa: PLR0917 - a kernel
    destination_ptr,  # (L)
    end_ptr,  # (D, B), int32: running sum of the counts, by destination and then by block
    count_ptr,  # (D, B), int32
    row_ptr,  # (L), int64, out
    first,
    slots,
    blocks,
    DESTINATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The row of each slot: after all slots of smaller destinations, and earlier ones of its own."""
    block = tl.program_id(0)
    one = tl.arange(0, BLOCK)
    start = block.to(tl.int64) * BLOCK
    mine = tl.load(destination_ptr + start + one, mask=start + one < slots, other=first - 1) - first
    # The same once more, across: a block is loaded in both directions of the square.
    other = (
        tl.load(destination_ptr + start + one[None, :], mask=(start + one < slots)[None, :], other=first - 1) - first
    )
    is_before = (mine[:, None] == other) & (one[None, :] < one[:, None])
    has_row = (mine >= 0) & (mine < DESTINATIONS)
    cell = mine.to(tl.int64) * blocks + block
    base = tl.load(end_ptr + cell, mask=has_row, other=0) - tl.load(count_ptr + cell, mask=has_row, other=0)
    row = tl.where(has_row, base + tl.sum(is_before.to(tl.int32), 1), -1)
    tl.store(row_ptr + start + one, row.to(tl.int64), mask=start + one < slots)


@triton.jit
def copy_to_rows(  # noqa: PLR0917 - a kernel
    x_ptr,  # (T, H)
    probs_ptr,  # (T, K); not read unless HAS_PROBS
    row_ptr,  # (T, K), int64
    out_ptr,  # (N, H)
    out_probs_ptr,  # (N)
    x_stride,
    out_stride,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program reads a token once and writes all its rows."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(x_ptr + token * x_stride + columns, mask=inside)
    for slot in range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot)
        tl.store(out_ptr + row * out_stride + columns, x, mask=columns < tl.where(row >= 0, SIZE, 0))
        if HAS_PROBS:
            is_first = (row >= 0) & (tl.program_id(1) == 0)
            prob = tl.load(probs_ptr + token * SLOTS + slot, mask=is_first)
            tl.store(out_probs_ptr + row, prob, mask=is_first)


@triton.jit
def pack_to_rows(  # noqa: PLR0917 - a kernel
    x_ptr,  # (T, H)
    probs_ptr,  # (T, K)
    ids_ptr,  # (T, K)
    row_ptr,  # (T, P), int64
    out_ptr,  # (N, H)
    out_probs_ptr,  # (N, K)
    out_ids_ptr,  # (N, K), int32
    x_stride,
    out_stride,
    out_probs_stride,
    out_ids_stride,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program reads a token, with the probabilities and ids of all its slots, and writes all its rows."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * x_stride + columns, mask=columns < SIZE)
    slot = tl.arange(0, WIDTH)
    slots = tl.where(tl.program_id(1) == 0, SLOTS, 0)
    probs = tl.load(probs_ptr + token * SLOTS + slot, mask=slot < slots)
    ids = tl.load(ids_ptr + token * SLOTS + slot, mask=slot < slots).to(tl.int32)
    for rank in range(RANKS):
        row = tl.load(row_ptr + token * RANKS + rank)
        tl.store(out_ptr + row * out_stride + columns, x, mask=columns < tl.where(row >= 0, SIZE, 0))
        there = slot < tl.where(row >= 0, slots, 0)
        tl.store(out_probs_ptr + row * out_probs_stride + slot, probs, mask=there)
        tl.store(out_ids_ptr + row * out_ids_stride + slot, ids, mask=there)


@triton.jit
def sum_to_tokens(  # noqa: PLR0917 - a kernel
    y_ptr,  # (N, H)
    weights_ptr,  # (T, K); not read unless HAS_WEIGHTS
    probs_ptr,  # (N); not read unless HAS_PROBS
    row_ptr,  # (T, K), int64
    out_ptr,  # (T, H)
    out_probs_ptr,  # (T, K)
    y_stride,
    out_stride,
    out_probs_stride,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program adds the rows of a token, in the order of its slots."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot)
        there = columns < tl.where(row >= 0, SIZE, 0)
        y = tl.load(y_ptr + row * y_stride + columns, mask=there, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            y *= tl.load(weights_ptr + token * SLOTS + slot).to(tl.float32)
        total += y
        if HAS_PROBS:
            prob = tl.load(probs_ptr + row, mask=row >= 0, other=0.0)
            tl.store(out_probs_ptr + token * out_probs_stride + slot, prob, mask=tl.program_id(1) == 0)
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weigh_to_rows(  # noqa: PLR0917 - a kernel
    grad_ptr,  # (T, H)
    y_ptr,  # (N, H)
    weights_ptr,  # (T, K)
    row_ptr,  # (T, K), int64
    grad_y_ptr,  # (N, H), contiguous
    grad_weights_ptr,  # (T, K)
    grad_stride,
    y_stride,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a weighted sum; a program takes one slot."""
    slot = tl.program_id(0).to(tl.int64)
    token = slot // SLOTS
    row = tl.load(row_ptr + slot)
    weight = tl.load(weights_ptr + slot).to(tl.float32)
    pull = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < tl.where(row >= 0, SIZE, 0)
        grad = tl.load(grad_ptr + token * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
        pull += grad * y
        tl.store(grad_y_ptr + row * SIZE + columns, (grad * weight).to(grad_y_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_weights_ptr + slot, tl.sum(pull, 0).to(grad_weights_ptr.dtype.element_ty))
