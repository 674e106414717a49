"""Triton kernels of the loss: logits of a chunk in, their gradient out, in one place; and a gradient times a number.

Shapes: C tokens, V classes of this rank.
"""

import triton
import triton.language as tl


@triton.jit
def _load(x_ptr, mask, soft_cap, HAS_CAP: tl.constexpr):
    """Logits in fp32, capped; −inf outside the mask."""
    x = tl.load(x_ptr, mask=mask, other=-float("inf")).to(tl.float32)
    if HAS_CAP:
        x = tl.where(mask, soft_cap * (2 * tl.sigmoid(2 * x / soft_cap) - 1), -float("inf"))
    return x


@triton.jit
def _gradient(  # noqa: PLR0917 - a kernel's
    x, log_norm, is_label, weight, n_classes, smoothing, z_loss, soft_cap, HAS_CAP: tl.constexpr
):
    """Of what `_load` gave; a token of weight 0 has none, whatever its logits are."""
    gradient = tl.exp(x - log_norm) * (1 + 2 * z_loss * log_norm) - smoothing / n_classes
    gradient = tl.where(is_label, gradient - (1 - smoothing), gradient)
    gradient = tl.where(weight == 0.0, 0.0, gradient * weight)
    if HAS_CAP:
        gradient *= 1 - (x / soft_cap) * (x / soft_cap)
    return gradient


@triton.jit
def softmax_rows(  # noqa: PLR0917 - a kernel
    logits_ptr,  # (C, V), in and out
    labels_ptr,  # (C), in the whole vocabulary
    weights_ptr,  # (C), fp32; not read unless HAS_WEIGHTS
    statistics_ptr,  # (4, C), fp32: maximum, sum of exp(logit − maximum), logit of the label, sum of logits
    log_norm_ptr,  # (C), fp32; read where STATISTICS are not made
    losses_ptr,  # (C), fp32
    stride,
    n_rows,
    n_classes,  # of all ranks
    first,  # class of this rank
    ignored,
    smoothing,
    z_loss,
    soft_cap,
    COLUMNS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row: with STATISTICS it reads the logits once, with GRADIENT it replaces them by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * stride
    label = tl.load(labels_ptr + row)
    is_kept = label != ignored
    weight = is_kept.to(tl.float32)
    if HAS_WEIGHTS:
        weight = tl.where(is_kept, tl.load(weights_ptr + row), 0.0)
    position = label - first
    is_here = is_kept & (position >= 0) & (position < COLUMNS)
    columns = tl.arange(0, BLOCK)
    if STATISTICS:
        top = tl.full((), -3.4e38, tl.float32)  # finite: a block may have no other logits than −inf
        total = tl.zeros((), tl.float32)
        plain_sum = tl.zeros((), tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            x = _load(x_ptr + start + columns, start + columns < COLUMNS, soft_cap, HAS_CAP)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
            if HAS_SMOOTHING:
                plain_sum += tl.sum(tl.where(start + columns < COLUMNS, x, 0.0), 0)
        pull = tl.where(is_here, _load(x_ptr + position, is_here, soft_cap, HAS_CAP), 0.0)
        if not GRADIENT:
            tl.store(statistics_ptr + row, top)
            tl.store(statistics_ptr + n_rows + row, total)
            tl.store(statistics_ptr + 2 * n_rows + row, pull)
            tl.store(statistics_ptr + 3 * n_rows + row, plain_sum)
        else:
            log_norm = top + tl.log(total)
            loss = log_norm - (1 - smoothing) * pull - smoothing / n_classes * plain_sum + z_loss * log_norm * log_norm
            tl.store(losses_ptr + row, tl.where(weight == 0.0, 0.0, loss * weight))
    else:
        log_norm = tl.load(log_norm_ptr + row)
    if GRADIENT:
        for start in range(0, COLUMNS, BLOCK):
            mask = start + columns < COLUMNS
            x = _load(x_ptr + start + columns, mask, soft_cap, HAS_CAP)
            is_label = (start + columns == position) & is_here
            gradient = _gradient(x, log_norm, is_label, weight, n_classes, smoothing, z_loss, soft_cap, HAS_CAP)
            tl.store(x_ptr + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def column_statistics(  # noqa: PLR0917 - a kernel
    logits_ptr,  # (V, C)
    labels_ptr,  # (C), in the whole vocabulary
    statistics_ptr,  # (4, parts, C), fp32: those of `softmax_rows` over a part of the classes
    stride,
    n_tokens,
    first,  # class of this rank
    ignored,
    soft_cap,
    CLASSES: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """A program so many tokens and, of them, ``STEPS`` blocks of classes."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    part = tl.program_id(1)
    begin = part * STEPS * BLOCK_CLASSES
    is_token = token < n_tokens
    top = tl.full((BLOCK_CLASSES, BLOCK_TOKENS), -3.4e38, tl.float32)
    total = tl.zeros((BLOCK_CLASSES, BLOCK_TOKENS), tl.float32)
    plain_sum = tl.zeros((BLOCK_CLASSES, BLOCK_TOKENS), tl.float32)
    for step in range(STEPS):
        row = (begin + step * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)).to(tl.int64)
        mask = (row < CLASSES)[:, None] & is_token[None, :]
        x = _load(logits_ptr + row[:, None] * stride + token[None, :], mask, soft_cap, HAS_CAP)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        if HAS_SMOOTHING:
            plain_sum += tl.where(mask, x, 0.0)
    highest = tl.max(top, 0)
    label = tl.load(labels_ptr + token, mask=is_token, other=ignored)
    position = (label - first).to(tl.int64)
    end = tl.minimum(begin + STEPS * BLOCK_CLASSES, CLASSES)
    is_mine = (label != ignored) & (position >= begin) & (position < end)
    pull = tl.where(is_mine, _load(logits_ptr + position * stride + token, is_mine, soft_cap, HAS_CAP), 0.0)
    step_to_next = tl.num_programs(1) * n_tokens
    out_ptr = statistics_ptr + part * n_tokens + token
    tl.store(out_ptr, highest, mask=is_token)
    tl.store(out_ptr + step_to_next, tl.sum(total * tl.exp(top - highest[None, :]), 0), mask=is_token)
    tl.store(out_ptr + 2 * step_to_next, pull, mask=is_token)
    tl.store(out_ptr + 3 * step_to_next, tl.sum(plain_sum, 0), mask=is_token)


@triton.jit
def column_gradient(  # noqa: PLR0917 - a kernel
    logits_ptr,  # (V, C), in and out
    labels_ptr,  # (C), in the whole vocabulary
    weights_ptr,  # (C), fp32; not read unless HAS_WEIGHTS
    log_norm_ptr,  # (C), fp32
    stride,
    n_tokens,
    n_classes,  # of all ranks
    first,  # class of this rank
    ignored,
    smoothing,
    z_loss,
    soft_cap,
    CLASSES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """A program so many tokens and classes, in a grid of one dim: CUDA takes at most 65,535 blocks along another."""
    blocks = tl.cdiv(n_tokens, BLOCK_TOKENS)
    token = tl.program_id(0) % blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = (tl.program_id(0) // blocks * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)).to(tl.int64)
    is_token = token < n_tokens
    label = tl.load(labels_ptr + token, mask=is_token, other=ignored)
    is_kept = label != ignored
    weight = is_kept.to(tl.float32)
    if HAS_WEIGHTS:
        weight = tl.where(is_kept, tl.load(weights_ptr + token, mask=is_token, other=0.0), 0.0)
    log_norm = tl.load(log_norm_ptr + token, mask=is_token, other=0.0)
    mask = (row < CLASSES)[:, None] & is_token[None, :]
    x_ptr = logits_ptr + row[:, None] * stride + token[None, :]
    x = _load(x_ptr, mask, soft_cap, HAS_CAP)
    is_label = (row[:, None] == (label - first)[None, :]) & is_kept[None, :]
    gradient = _gradient(
        x, log_norm[None, :], is_label, weight[None, :], n_classes, smoothing, z_loss, soft_cap, HAS_CAP
    )
    tl.store(x_ptr, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_unless_one(x_ptr, factor_ptr, size, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply in place by a number on the device; where that is 1, memory is not touched."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
        for step in range(STEPS):
            index = first + step * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
            tl.store(x_ptr + index, (x * factor).to(x_ptr.dtype.element_ty), mask=index < size)
