"""Triton kernels of the loss: logits of a chunk in, their gradient out, in one place; and a gradient times a number.

Shapes: C tokens, V classes of this rank.
"""

import triton
import triton.language as tl


@triton.jit
def _load(x_ptr, columns, COLUMNS: tl.constexpr, soft_cap, HAS_CAP: tl.constexpr):
    """Logits in fp32, capped; −inf beyond the last."""
    x = tl.load(x_ptr + columns, mask=columns < COLUMNS, other=-float("inf")).to(tl.float32)
    if HAS_CAP:
        x = tl.where(columns < COLUMNS, soft_cap * (2 * tl.sigmoid(2 * x / soft_cap) - 1), -float("inf"))
    return x


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
            x = _load(x_ptr, start + columns, COLUMNS, soft_cap, HAS_CAP)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
            if HAS_SMOOTHING:
                plain_sum += tl.sum(tl.where(start + columns < COLUMNS, x, 0.0), 0)
        pull = tl.load(x_ptr + position, mask=is_here, other=0.0).to(tl.float32)
        if HAS_CAP:
            pull = tl.where(is_here, soft_cap * (2 * tl.sigmoid(2 * pull / soft_cap) - 1), 0.0)
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
            x = _load(x_ptr, start + columns, COLUMNS, soft_cap, HAS_CAP)
            gradient = tl.exp(x - log_norm) * (1 + 2 * z_loss * log_norm) - smoothing / n_classes
            gradient = tl.where((start + columns == position) & is_here, gradient - (1 - smoothing), gradient)
            gradient = tl.where(weight == 0.0, 0.0, gradient * weight)
            if HAS_CAP:
                gradient *= 1 - (x / soft_cap) * (x / soft_cap)
            tl.store(x_ptr + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=start + columns < COLUMNS)


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
