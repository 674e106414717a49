"""Numbers that a token gets from its logits, with their gradients.

Shapes: N tokens, C of them in a chunk, V classes of this rank.
"""

from typing import Protocol

import attrs
import torch
from torch import Tensor

from ._options import LossOptions
from ._softmax import Targets, gradient_, log_partition, losses
from ._vocabulary import VocabularyShard


class TokenScore(Protocol):
    """A number for each token that depends on its logits. Logits are capped already."""

    def score(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The scores of these rows of all tokens, (C,), and what `gradient_` will want to know again, (C, any)."""
        ...

    def gradient_(self, logits_CV: Tensor, rows: slice, known: Tensor, upstream_C: Tensor) -> Tensor:
        """In place of the logits, the gradient of the sum of scores times upstream, with respect to them."""
        ...


@attrs.frozen
class Loss:
    """As `LossOptions` has it."""

    labels_N: Tensor
    options: LossOptions
    shard: VocabularyShard | None

    def score(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """See `TokenScore`."""
        log_norm_C1 = log_partition(logits_CV, self.shard)
        targets = self._targets(logits_CV, rows, None)
        return losses(logits_CV, log_norm_C1, targets, self.options, self.shard)[:, 0], log_norm_C1

    def gradient_(self, logits_CV: Tensor, rows: slice, known: Tensor, upstream_C: Tensor) -> Tensor:
        """See `TokenScore`."""
        return gradient_(logits_CV, known, self._targets(logits_CV, rows, upstream_C), self.options, self.shard)

    def _targets(self, logits_CV: Tensor, rows: slice, weights_C: Tensor | None) -> Targets:
        return Targets.of(self.labels_N[rows], weights_C, logits_CV.shape[1], self.options.ignore_index, self.shard)


@attrs.frozen
class Entropy:
    """``−Σ p · log p``, where a class that cannot be, with a logit of −∞, adds 0."""

    shard: VocabularyShard | None

    def score(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """See `TokenScore`."""
        del rows
        log_norm_C1 = log_partition(logits_CV, self.shard)
        entropy_C1: Tensor = torch.special.entr(logits_CV.sub_(log_norm_C1).exp_()).sum(-1, keepdim=True)
        if self.shard is not None:
            self.shard.sum_(entropy_C1)
        return entropy_C1[:, 0], torch.cat([log_norm_C1, entropy_C1], 1)

    def gradient_(self, logits_CV: Tensor, rows: slice, known: Tensor, upstream_C: Tensor) -> Tensor:
        """See `TokenScore`: ``d H / d z = −p · log p − p · H``."""
        del rows
        log_norm_C1, entropy_C1 = known.split(1, 1)
        probs_CV = logits_CV.sub_(log_norm_C1).exp_()
        terms_CV: Tensor = torch.special.entr(probs_CV)
        return terms_CV.sub_(probs_CV.mul_(entropy_C1)).mul_(upstream_C[:, None])
