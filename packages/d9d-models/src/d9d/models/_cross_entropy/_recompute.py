"""Scores of single tokens, whose gradients wait for backward: four matrix products, with logits made twice.

Two operators, forward and backward, opaque to torch.compile: see `_chunked`.

Shapes: N tokens, C of them in a chunk, H hidden size, V classes of this rank.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._chunk_sizes import chunks, even_chunk, rows_within
from ._gradients import Gradients, dtype_for
from ._labels import check_labels, counted, without_uncounted
from ._options import LossOptions
from ._products import multiply, wide, without_autocast
from ._scores import Entropy, Loss, TokenScore
from ._softmax import cap_, cap_slope
from ._two_nodes import with_gradients
from ._vocabulary import VocabularyShard, plain


def scores(
    hidden: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels: Tensor | None,
    *,
    options: LossOptions,
    shard: VocabularyShard | None,
    max_logits_bytes: int,
) -> Tensor:
    """(...), fp32 or fp64, of hidden states (..., H), differentiable in them, weight and bias.

    The loss of each token, or without labels its entropy.
    """
    hidden_NH = hidden.reshape(-1, hidden.shape[-1])
    operands = (hidden_NH, weight_VH, bias_V, None if labels is None else labels.flatten())
    plain_arguments = (
        options.ignore_index,
        options.label_smoothing,
        options.z_loss,
        options.soft_cap,
        *plain(shard),
        rows_within(max_logits_bytes, weight_VH, shard, wide(hidden.dtype)),
    )
    with without_autocast(hidden.device.type):
        needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in operands]
        if torch.compiler.is_compiling() or not any(needs):  # to the compiler all gradients are one node
            found_N: Tensor = _token_scores(*operands, *plain_arguments)[0]
        else:
            summed = wide(hidden.dtype)
            dtypes = [hidden.dtype, *(None if x is None else dtype_for(x, summed) for x in (weight_VH, bias_V))]
            with torch.no_grad():
                found_N, known_NK = _token_scores(*operands, *plain_arguments)
            found_N = with_gradients(
                found_N,
                hidden_NH,
                weight_VH,
                bias_V,
                saved=(known_NK, *operands),
                backward=functools.partial(_gradients, plain_arguments=plain_arguments, dtypes=dtypes),
            )
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
    return hidden_NH.new_empty((chunk, len(weight_VH)), dtype=wide(hidden_NH.dtype))


def _score_of(labels_N: Tensor | None, options: LossOptions, shard: VocabularyShard | None) -> TokenScore:
    return Entropy(shard) if labels_N is None else Loss(labels_N, options, shard)


def _hidden_of(hidden_NH: Tensor, labels_N: Tensor | None, rows: slice, ignore_index: int) -> Tensor:
    if labels_N is None:
        return hidden_NH[rows]
    return without_uncounted(hidden_NH[rows], counted(labels_N[rows], None, ignore_index))


@torch.library.custom_op("d9d::token_scores", mutates_args=())
def _token_scores(  # noqa: PLR0917 - operators take no keywords from autograd
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str | None,
    classes: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The scores (N,), and what backward will want to know again, (N, any)."""
    options = LossOptions(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, soft_cap=soft_cap)
    shard = VocabularyShard.of(group_name, classes)
    score = _score_of(labels_N, options, shard)
    narrow_VH = weight_VH.to(hidden_NH.dtype)
    chunk = even_chunk(len(hidden_NH), chunk)
    memory = memory_for(hidden_NH, weight_VH, chunk)
    found_N = memory.new_empty(len(hidden_NH))
    known_NK = memory.new_empty(_known_shape(hidden_NH, labels_N))
    for rows in chunks(len(hidden_NH), chunk):
        hidden = _hidden_of(hidden_NH, labels_N, rows, ignore_index)
        logits = logits_of(hidden, narrow_VH, bias_V, soft_cap, memory)
        found_N[rows], known_NK[rows] = score.score(logits, rows)
    if labels_N is not None:
        wrong_N = check_labels(labels_N, len(weight_VH) if shard is None else classes, ignore_index)
        found_N.masked_fill_(wrong_N, torch.nan)
    return found_N, known_NK


def _known_shape(hidden_NH: Tensor, labels_N: Tensor | None) -> tuple[int, int]:
    return hidden_NH.shape[0], 2 if labels_N is None else 1


@_token_scores.register_fake
def _(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor | None, *_: Any) -> Any:
    del weight_VH, bias_V
    dtype = wide(hidden_NH.dtype)
    return (
        hidden_NH.new_empty(hidden_NH.shape[0], dtype=dtype),
        hidden_NH.new_empty(_known_shape(hidden_NH, labels_N), dtype=dtype),
    )


@torch.library.custom_op("d9d::token_scores_backward", mutates_args=())
def _token_scores_backward(  # noqa: PLR0917
    upstream_N: Tensor,
    known_NK: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str | None,
    classes: int,
    chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden states, weight and bias, of these two as they are summed; empty where not needed."""
    options = LossOptions(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, soft_cap=soft_cap)
    shard = VocabularyShard.of(group_name, classes)
    score = _score_of(labels_N, options, shard)
    gradients = Gradients.new(
        hidden_NH, weight_VH, needs=(needs[0], needs[1], needs[2]), shard=shard, weight_dtype=wide(hidden_NH.dtype)
    )
    narrow_VH = weight_VH.to(hidden_NH.dtype)
    chunk = even_chunk(len(hidden_NH), chunk)
    memory = memory_for(hidden_NH, narrow_VH, chunk)
    for rows in chunks(len(hidden_NH), chunk):
        hidden = _hidden_of(hidden_NH, labels_N, rows, ignore_index)
        logits = logits_of(hidden, narrow_VH, bias_V, soft_cap, memory)
        slope = None if soft_cap is None else cap_slope(logits, soft_cap)
        gradient = score.gradient_(logits, rows, known_NK[rows], upstream_N[rows])
        if slope is not None:
            gradient.mul_(slope)
        gradients.add_(rows, gradient, hidden, narrow_VH)
    return gradients.finished(hidden_NH.dtype, shard).or_empty(hidden_NH)


@_token_scores_backward.register_fake
def _(
    upstream_N: Tensor,
    known_NK: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    *others: Any,
) -> Any:
    del upstream_N, known_NK
    needs: list[bool] = others[-1]
    summed = wide(hidden_NH.dtype)
    gradients = Gradients(
        torch.empty_like(hidden_NH) if needs[0] else None,
        torch.empty_like(weight_VH, dtype=summed) if needs[1] else None,
        None if bias_V is None or not needs[2] else torch.empty_like(bias_V, dtype=summed),
    )
    return gradients.or_empty(hidden_NH)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.plain = inputs[:4], inputs[4:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx: Any, upstream_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs, operands = ctx.needs_input_grad[:3], ctx.saved_tensors[1:4]
    dtypes = [None if x is None else x.dtype for x in operands]
    made = _gradients(upstream_N, ctx.saved_tensors, needs, plain_arguments=ctx.plain, dtypes=dtypes)
    return *made, *(None for _ in ("labels", *ctx.plain))


def _gradients(
    upstream: Tensor,
    saved: Sequence[Tensor | None],
    needs: tuple[bool, bool, bool],
    *,
    plain_arguments: tuple[Any, ...],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, ...]:
    """See `Backward`; in these dtypes."""
    made = _token_scores_backward(upstream, *saved, *plain_arguments, list(needs))
    return tuple(gradient.to(dtype) if is_needed else None for gradient, dtype, is_needed in zip(made, dtypes, needs))


_token_scores.register_autograd(_backward, setup_context=_keep)
