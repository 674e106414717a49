"""Cross-entropy of a linear layer's output that never holds all of it.

Shapes: N tokens, H hidden size, V vocabulary.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from d9d.parallel import LossSum


def linear_cross_entropy(
    hidden: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    max_logits_bytes: int = 256 << 20,
) -> LossSum:
    """Sum over tokens of ``-log softmax(hidden · weightᵀ)[label]``.

    Logits exist for one chunk of tokens at a time. Their gradient is known as soon as they are, up to the gradient
    of the sum, which is one number: so forward computes the gradients of ``hidden`` and ``weight`` chunk by chunk, and
    backward multiplies them by that number. That takes three matrix products, where recomputing logits in backward
    takes four.

    Logits, softmax and the accumulation of the weight's gradient are fp32, or fp64 for fp64 inputs, under autocast
    too.

    Args:
        hidden: (..., H).
        weight_VH: (V, H), of the same dtype.
        labels: (...), int64; class of each token, or ``ignore_index``.
        ignore_index: Tokens with this label add neither loss nor weight.
        max_logits_bytes: Memory for the logits of one chunk; at least one token is taken at a time.

    Returns:
        The sum, and the number of labels that are not ignored (int64).

    Raises:
        ValueError: Shapes or dtypes do not go together.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight_VH.shape[-1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} needs labels {tuple(hidden.shape[:-1])} and a weight (V, "
            f"{hidden.shape[-1]}), got labels {tuple(labels.shape)} and a weight {tuple(weight_VH.shape)}"
        )
    if hidden.dtype != weight_VH.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and the weight is {weight_VH.dtype}: cast one to the other's dtype")
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    chunk = max(1, max_logits_bytes // (weight_VH.shape[0] * dtype.itemsize))
    flat = labels.flatten()
    rows = hidden.reshape(-1, hidden.shape[-1])
    with _without_autocast(hidden.device.type):
        total: Tensor = _LinearCrossEntropy.apply(rows, weight_VH, flat, ignore_index, chunk, torch.is_grad_enabled())
    return LossSum(total, (flat != ignore_index).sum())


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - apply() takes no keywords
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        ignore_index: int,
        chunk: int,
        grad_enabled: bool,  # noqa: FBT001
    ) -> Tensor:
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        # needs_input_grad says what requires a gradient, also where none is recorded.
        needs_hidden, needs_weight = (needs and grad_enabled for needs in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        total = hidden_NH.new_zeros((), dtype=wide)
        for start in range(0, hidden_NH.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden, labels = hidden_NH[rows], labels_N[rows]
            kept = (labels != ignore_index)[:, None]
            classes = labels[:, None].where(kept, 0)
            logits = _matmul(hidden, weight_VH.T, wide)
            log_norm = logits.logsumexp(-1, keepdim=True)
            total += (log_norm - logits.gather(-1, classes)).where(kept, 0.0).sum()
            if not (needs_hidden or needs_weight):
                continue
            # d loss / d logits = softmax − one-hot, in place of the logits.
            grad_logits = logits.sub_(log_norm).exp_()
            grad_logits.scatter_add_(-1, classes, grad_logits.new_full((), -1.0).expand_as(classes))
            grad_logits.masked_fill_(~kept, 0.0)
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight_VH, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += _matmul(narrow.T, hidden, wide)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VH.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a · b`` accumulated and returned in ``dtype``."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
