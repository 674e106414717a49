"""What single tokens get from a linear layer's output, which never exists as a whole."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._chunk_sizes import chunks, even_chunk, rows_within
from ._linear import MAX_LOGITS_BYTES, check_operands
from ._options import LossOptions
from ._products import under_autocast, wide, without_autocast
from ._recompute import logits_of, memory_for, scores
from ._softmax import log_partition
from ._vocabulary import VocabularyShard, plain


def token_cross_entropy(
    hidden: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    *,
    bias_V: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    shard: VocabularyShard | None = None,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> Tensor:
    """The loss of each token, for any use of it: to weigh by something with a gradient, say.

    Where the sum is all that is wanted, `linear_cross_entropy` takes three matrix products for this one's four.
    Arguments and errors are its.

    Returns:
        The shape of ``labels``, fp32 or fp64; 0 where the label is ignored.
    """
    options = LossOptions(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, soft_cap=soft_cap)
    hidden, weight_VH = under_autocast(hidden, weight_VH)
    check_operands(hidden, weight_VH, bias_V, labels, shard)
    return scores(hidden, weight_VH, bias_V, labels, options=options, shard=shard, max_logits_bytes=max_logits_bytes)


def token_log_probs(
    hidden: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    *,
    bias_V: Tensor | None = None,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    shard: VocabularyShard | None = None,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> Tensor:
    """The log-probability of each label, differentiable; arguments, errors and result as of `token_cross_entropy`."""
    return -token_cross_entropy(
        hidden,
        weight_VH,
        labels,
        bias_V=bias_V,
        ignore_index=ignore_index,
        soft_cap=soft_cap,
        shard=shard,
        max_logits_bytes=max_logits_bytes,
    )


def token_entropies(
    hidden: Tensor,
    weight_VH: Tensor,
    *,
    bias_V: Tensor | None = None,
    soft_cap: float | None = None,
    shard: VocabularyShard | None = None,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> Tensor:
    """The entropy, in nats, of what each of (...) tokens predicts; differentiable, fp32 or fp64."""
    options = LossOptions(soft_cap=soft_cap)
    hidden, weight_VH = under_autocast(hidden, weight_VH)
    check_operands(hidden, weight_VH, bias_V, None, shard)
    return scores(hidden, weight_VH, bias_V, None, options=options, shard=shard, max_logits_bytes=max_logits_bytes)


@dataclass(frozen=True)  # torch.compile does not understand how attrs freezes
class TopK:
    """The likeliest classes of each token, likeliest first."""

    log_probs: Tensor
    """(..., k), fp32 or fp64."""

    classes: Tensor
    """(..., k), int64, in the whole vocabulary."""


def top_k_log_probs(
    hidden: Tensor,
    weight_VH: Tensor,
    k: int,
    *,
    bias_V: Tensor | None = None,
    soft_cap: float | None = None,
    shard: VocabularyShard | None = None,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> TopK:
    """The ``k`` likeliest classes of each token, without gradient.

    Raises:
        ValueError: There are fewer classes, or shapes or dtypes do not go together.
    """
    hidden, weight_VH = under_autocast(hidden, weight_VH)
    check_operands(hidden, weight_VH, bias_V, None, shard)
    options = LossOptions(soft_cap=soft_cap)
    total = weight_VH.shape[0] if shard is None else shard.total
    if not 1 <= k <= total:
        raise ValueError(f"k={k!r}: there are {total} classes, ask for 1 to {total} of them")
    with torch.no_grad(), without_autocast(hidden.device.type):
        log_probs_NK, classes_NK = _top_k(
            hidden.reshape(-1, hidden.shape[-1]),
            weight_VH,
            k,
            bias_V,
            options.soft_cap,
            *plain(shard),
            rows_within(max_logits_bytes, weight_VH, shard, wide(hidden.dtype)),
        )
    shape = (*hidden.shape[:-1], k)
    return TopK(log_probs_NK.view(shape), classes_NK.view(shape))


@torch.library.custom_op("d9d::top_k_log_probs", mutates_args=())
def _top_k(  # noqa: PLR0917 - as of the other operators
    hidden_NH: Tensor,
    weight_VH: Tensor,
    k: int,
    bias_V: Tensor | None,
    soft_cap: float | None,
    group_name: str | None,
    total: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    shard = VocabularyShard.of(group_name, total)
    chunk = even_chunk(len(hidden_NH), chunk)
    memory = memory_for(hidden_NH, weight_VH, chunk)
    weight_VH = weight_VH.to(hidden_NH.dtype)
    log_probs_NK = memory.new_empty((len(hidden_NH), k))
    classes_NK = torch.empty_like(log_probs_NK, dtype=torch.int64)
    for rows in chunks(len(hidden_NH), chunk):
        logits = logits_of(hidden_NH[rows], weight_VH, bias_V, soft_cap, memory)
        log_norm_C1 = log_partition(logits, shard)
        best = logits.topk(min(k, logits.shape[1]))
        values, indices = best.values, best.indices
        if shard is not None:
            values, indices = _best_of_ranks(values, indices + shard.start, k, shard)
        log_probs_NK[rows], classes_NK[rows] = values - log_norm_C1, indices
    return log_probs_NK, classes_NK


@_top_k.register_fake
def _(hidden_NH: Tensor, weight_VH: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
    del weight_VH
    shape = (hidden_NH.shape[0], k)
    return hidden_NH.new_empty(shape, dtype=wide(hidden_NH.dtype)), hidden_NH.new_empty(shape, dtype=torch.int64)


def _best_of_ranks(values_CK: Tensor, classes_CK: Tensor, k: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The best of what each rank thinks best."""
    padding = (0, k - values_CK.shape[1])
    values = torch.nn.functional.pad(values_CK, padding, value=-torch.inf).contiguous()
    classes = torch.nn.functional.pad(classes_CK, padding).contiguous()
    of_ranks = [[torch.empty_like(x) for _ in range(shard.group.size())] for x in (values, classes)]
    for mine, gathered in zip((values, classes), of_ranks):
        dist.all_gather(gathered, mine, group=shard.group)
    all_values, all_classes = (torch.cat(gathered, 1) for gathered in of_ranks)
    best = all_values.topk(k)
    return best.values, all_classes.gather(1, best.indices)
