"""Scores of single tokens, whose gradients wait for backward: four matrix products, with logits made twice.

Shapes: N tokens, C of them in a chunk, H hidden size, V classes of this rank.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._products import add_product_, multiply, wide, without_autocast
from ._softmax import cap_, cap_slope
from ._three_products import chunks
from ._vocabulary import VocabularyShard


class TokenScore(Protocol):
    """A number for each token that depends on its logits."""

    @property
    def soft_cap(self) -> float | None:
        """Of the logits that the methods are given, which are capped already."""
        ...

    def score(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The scores of these rows of all tokens, (C,), and what `gradient_` will want to know again, (C, any)."""
        ...

    def gradient_(self, logits_CV: Tensor, rows: slice, known: Tensor, upstream_C: Tensor) -> Tensor:
        """In place of the logits, the gradient of the sum of scores times upstream, with respect to capped logits."""
        ...


def scores(
    hidden: Tensor,
    weight_VH: Tensor,
    *,
    bias_V: Tensor | None,
    score: TokenScore,
    shard: VocabularyShard | None,
    max_logits_bytes: int,
) -> Tensor:
    """(...), fp32 or fp64, of hidden states (..., H), differentiable in them, weight and bias."""
    classes = weight_VH.shape[0] if shard is None else shard.length
    chunk = max(1, max_logits_bytes // max(1, classes * wide(hidden.dtype).itemsize))
    rows_NH = hidden.reshape(-1, hidden.shape[-1])
    with without_autocast(hidden.device.type):
        found_N: Tensor = _Scores.apply(rows_NH, weight_VH, bias_V, score, shard, chunk)
    return found_N.view(hidden.shape[:-1])


def logits_of(
    hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None, soft_cap: float | None, memory: Tensor
) -> Tensor:
    """Capped logits of a chunk, in fp32 or fp64."""
    logits = multiply(hidden, weight_VH.T, memory[: len(hidden)])
    if bias_V is not None:
        logits += bias_V
    if soft_cap is not None:
        cap_(logits, soft_cap)
    return logits


def memory_for(hidden_NH: Tensor, weight_VH: Tensor, chunk: int) -> Tensor:
    """For the logits of one chunk."""
    return hidden_NH.new_empty((min(chunk, len(hidden_NH)), len(weight_VH)), dtype=wide(hidden_NH.dtype))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - apply() takes no keywords
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        score: TokenScore,
        shard: VocabularyShard | None,
        chunk: int,
    ) -> Tensor:
        memory = memory_for(hidden_NH, weight_VH, chunk)
        found, known = [memory.new_empty(0)], []
        for rows in chunks(len(hidden_NH), chunk):
            logits = logits_of(hidden_NH[rows], weight_VH, bias_V, score.soft_cap, memory)
            scores_C, known_C = score.score(logits, rows)
            found.append(scores_C)
            known.append(known_C)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, *known)
        ctx.score, ctx.shard, ctx.chunk = score, shard, chunk
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, *known = ctx.saved_tensors
        exact = wide(hidden_NH.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NH, dtype=exact) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=exact) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=exact) if needs_bias else None
        memory = memory_for(hidden_NH, weight_VH, ctx.chunk)
        for rows, known_C in zip(chunks(len(hidden_NH), ctx.chunk), known):
            hidden = hidden_NH[rows]
            logits = logits_of(hidden, weight_VH, bias_V, ctx.score.soft_cap, memory)
            slope = None if ctx.score.soft_cap is None else cap_slope(logits, ctx.score.soft_cap)
            gradient = ctx.score.gradient_(logits, rows, known_C, upstream_N[rows])
            if slope is not None:
                gradient.mul_(slope)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            narrow = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                multiply(narrow, weight_VH, grad_hidden[rows])
            if grad_weight is not None:
                add_product_(grad_weight, narrow.T, hidden)
        if grad_hidden is not None:
            if ctx.shard is not None:
                ctx.shard.sum_(grad_hidden)
            grad_hidden = grad_hidden.to(hidden_NH.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None
