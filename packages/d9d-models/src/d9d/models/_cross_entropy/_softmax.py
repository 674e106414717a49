"""Losses and their gradients of one chunk of logits: the formulas, in plain torch.

Shapes: C tokens, V classes of this rank. All numbers are fp32, or fp64.
"""

import attrs
import torch
from torch import Tensor

from ._options import LossOptions
from ._vocabulary import VocabularyShard


@attrs.frozen
class Targets:
    """What the tokens of a chunk shall be, on this rank."""

    position_C1: Tensor
    """Index of the label among this rank's classes; 0 where it is not there."""

    is_here_C1: Tensor
    """Whether this rank holds the label."""

    weight_C1: Tensor
    """Of the token; 0 where its label is ignored."""

    is_weighted: bool
    """Whether weights may be anything but 0 and 1."""

    @classmethod
    def of(
        cls, labels_C: Tensor, weights_C: Tensor | None, classes: int, ignore_index: int, shard: VocabularyShard | None
    ) -> "Targets":
        """Of labels in the whole vocabulary, of which this rank has ``classes``."""
        position = labels_C[:, None] - (0 if shard is None else shard.start)
        kept = labels_C[:, None] != ignore_index
        is_here = kept & (position >= 0) & (position < classes)
        weight = kept if weights_C is None else weights_C[:, None].where(kept, 0.0)
        return cls(position.where(is_here, 0), is_here, weight, weights_C is not None)


def cap_(logits_CV: Tensor, soft_cap: float) -> None:
    """Bend logits in place, so that none exceeds the cap."""
    logits_CV.div_(soft_cap).tanh_().mul_(soft_cap)


def cap_slope(capped_CV: Tensor, soft_cap: float) -> Tensor:
    """Derivatives of the cap, from what it made."""
    return 1 - (capped_CV / soft_cap).square_()


def log_partition(logits_CV: Tensor, shard: VocabularyShard | None) -> Tensor:
    """(C, 1): logsumexp over all classes of all ranks."""
    if shard is None:
        return logits_CV.logsumexp(-1, keepdim=True)
    lowest = torch.finfo(logits_CV.dtype).min
    top = logits_CV.amax(-1, keepdim=True) if logits_CV.shape[1] else logits_CV.new_full((len(logits_CV), 1), lowest)
    shard.max_(top)
    total = (logits_CV - top).exp_().sum(-1, keepdim=True)
    shard.sum_(total)
    return top + total.log()


def losses(
    logits_CV: Tensor, log_norm_C1: Tensor, targets: Targets, options: LossOptions, shard: VocabularyShard | None
) -> Tensor:
    """(C, 1), weighted. Logits are capped already."""
    if logits_CV.shape[1]:
        pull = logits_CV.gather(-1, targets.position_C1).where(targets.is_here_C1, 0.0)
    else:
        pull = torch.zeros_like(log_norm_C1)
    pull = pull * (1 - options.label_smoothing)
    if options.label_smoothing:
        classes = logits_CV.shape[1] if shard is None else shard.total
        pull += options.label_smoothing / classes * logits_CV.sum(-1, keepdim=True)
    if shard is not None:
        shard.sum_(pull)
    loss = log_norm_C1 - pull + options.z_loss * log_norm_C1.square()
    return (loss * targets.weight_C1).where(targets.weight_C1 != 0, 0.0)


def gradient_(
    logits_CV: Tensor, log_norm_C1: Tensor, targets: Targets, options: LossOptions, shard: VocabularyShard | None
) -> Tensor:
    """The gradient of the sum of `losses`, in place of the logits, which are capped."""
    weight_C1 = targets.weight_C1.to(logits_CV.dtype)
    # exp(logit − ∞) is 0 for tokens that do not count, at no extra cost
    gradient = logits_CV.sub_(log_norm_C1.where(weight_C1 != 0, torch.inf)).exp_()
    if targets.is_weighted or options.z_loss:
        gradient.mul_(weight_C1 * (1 + 2 * options.z_loss * log_norm_C1))
    if options.label_smoothing:
        classes = logits_CV.shape[1] if shard is None else shard.total
        gradient.sub_(options.label_smoothing / classes * weight_C1)
    if logits_CV.shape[1]:
        of_label = (options.label_smoothing - 1) * weight_C1.where(targets.is_here_C1, 0.0)
        gradient.scatter_add_(-1, targets.position_C1, of_label)
    return gradient
