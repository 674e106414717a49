"""Heads that sort tokens or sequences into classes."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from d9d.parallel import LossSum

from ._pooling import Pooling, pool

IGNORED = -100
"""Label of what has no class."""


@dataclass(frozen=True, kw_only=True)
class ClassificationOutput:
    """What a classification head returns."""

    logits: Tensor
    """(..., classes)."""

    loss: LossSum | None = None
    """Summed cross-entropy and the number of labels; none without labels."""


# As a pytree, so that every version of `fully_shard` finds the tensors in what the model returns.
register_dataclass(ClassificationOutput)


class TokenClassificationHead(nn.Module):
    """A class for each token.

    Args:
        hidden_size: H.
        classes: How many.
        bias: Whether logits have one.
        dropout: Of the hidden states, in training.
    """

    def __init__(self, hidden_size: int, classes: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(hidden_size, classes, bias=bias)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> ClassificationOutput:
        """Logits of (..., H), and the loss against labels (...), int64, -100 where there is none."""
        return _classify(self.scores(self.dropout(hidden)), labels)


class SequenceClassificationHead(nn.Module):
    """A class for each sequence, from one vector of it.

    Args:
        hidden_size: H.
        classes: How many.
        pooling: Which vector.
        bias: Whether logits have one.
        dropout: Of that vector, in training.
    """

    def __init__(
        self, hidden_size: int, classes: int, *, pooling: Pooling = "last", bias: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(hidden_size, classes, bias=bias)

    def forward(
        self, hidden_BSH: Tensor, labels_B: Tensor | None = None, *, mask_BS: Tensor | None = None
    ) -> ClassificationOutput:
        """Logits (B, classes) of the positions that the mask counts (all without one), and the loss against labels."""
        return _classify(self.scores(self.dropout(pool(hidden_BSH, mask_BS, self.pooling))), labels_B)


def _classify(logits: Tensor, labels: Tensor | None) -> ClassificationOutput:
    if labels is None:
        return ClassificationOutput(logits=logits)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} need labels {tuple(logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    wide = logits if logits.dtype.itemsize > 4 else logits.float()
    total = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return ClassificationOutput(logits=logits, loss=LossSum(total, (labels != IGNORED).sum()))
