"""What single tokens get from a linear layer's output, which never exists as a whole."""

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ._linear import MAX_LOGITS_BYTES, check_labels, check_operands
from ._options import LossOptions
from ._products import wide, without_autocast
from ._recompute import logits_of, memory_for, scores
from ._softmax import Targets, gradient_, log_partition, losses
from ._three_products import chunks
from ._vocabulary import VocabularyShard


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
    check_operands(hidden, weight_VH, bias_V, labels, shard)
    check_labels(labels.flatten(), weight_VH.shape[0] if shard is None else shard.total, ignore_index)
    score = _Loss(options, labels.flatten(), weight_VH.shape[0], shard)
    return scores(hidden, weight_VH, bias_V=bias_V, score=score, shard=shard, max_logits_bytes=max_logits_bytes)


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
    check_operands(hidden, weight_VH, bias_V, hidden[..., 0], shard)
    score = _Entropy(soft_cap, shard)
    return scores(hidden, weight_VH, bias_V=bias_V, score=score, shard=shard, max_logits_bytes=max_logits_bytes)


@attrs.frozen
class TopK:
    """The likeliest classes of each token, likeliest first."""

    log_probs: Tensor
    """(..., k), fp32 or fp64."""

    classes: Tensor
    """(..., k), int64, in the whole vocabulary."""


@torch.no_grad()
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
    check_operands(hidden, weight_VH, bias_V, hidden[..., 0], shard)
    total = weight_VH.shape[0] if shard is None else shard.total
    if not 1 <= k <= total:
        raise ValueError(f"k={k!r}: there are {total} classes, ask for 1 to {total} of them")
    rows_NH = hidden.reshape(-1, hidden.shape[-1])
    chunk = max(1, max_logits_bytes // max(1, total * wide(hidden.dtype).itemsize))
    log_probs, classes = [], []
    with without_autocast(hidden.device.type):
        memory = memory_for(rows_NH, weight_VH, chunk)
        for rows in chunks(len(rows_NH), chunk):
            logits = logits_of(rows_NH[rows], weight_VH, bias_V, soft_cap, memory)
            log_norm_C1 = log_partition(logits, shard)
            best = logits.topk(min(k, logits.shape[1]))
            values, indices = best.values, best.indices
            if shard is not None:
                values, indices = _best_of_ranks(values, indices + shard.start, k, shard)
            log_probs.append(values - log_norm_C1)
            classes.append(indices)
    shape = (*hidden.shape[:-1], k)
    empty = memory.new_empty((0, k))
    return TopK(torch.cat([empty, *log_probs]).view(shape), torch.cat([empty.long(), *classes]).view(shape))


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


@attrs.frozen
class _Loss:
    options: LossOptions
    labels_N: Tensor
    classes: int
    shard: VocabularyShard | None

    @property
    def soft_cap(self) -> float | None:
        return self.options.soft_cap

    def score(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_norm_C1 = log_partition(logits_CV, self.shard)
        return losses(logits_CV, log_norm_C1, self._targets(rows, None), self.options, self.shard)[:, 0], log_norm_C1

    def gradient_(self, logits_CV: Tensor, rows: slice, known: Tensor, upstream_C: Tensor) -> Tensor:
        return gradient_(logits_CV, known, self._targets(rows, upstream_C), self.options, self.shard)

    def _targets(self, rows: slice, weights_C: Tensor | None) -> Targets:
        return Targets.of(self.labels_N[rows], weights_C, self.classes, self.options.ignore_index, self.shard)


@attrs.frozen
class _Entropy:
    soft_cap: float | None
    shard: VocabularyShard | None

    def score(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        del rows
        log_norm_C1 = log_partition(logits_CV, self.shard)
        mean_C1 = ((logits_CV - log_norm_C1).exp_() * logits_CV).sum(-1, keepdim=True)
        if self.shard is not None:
            self.shard.sum_(mean_C1)
        entropy_C1 = log_norm_C1 - mean_C1
        return entropy_C1[:, 0], torch.cat([log_norm_C1, entropy_C1], 1)

    def gradient_(self, logits_CV: Tensor, rows: slice, known: Tensor, upstream_C: Tensor) -> Tensor:
        # d H / d z = −p · (log p + H)
        del rows
        log_probs_CV = logits_CV.sub_(known[:, :1])
        factor_CV = (log_probs_CV + known[:, 1:]).mul_(-upstream_C[:, None])
        return log_probs_CV.exp_().mul_(factor_CV)
