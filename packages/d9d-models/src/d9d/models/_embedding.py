"""A head that embeds sequences, and the loss that brings those close that belong together."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d9d.parallel import LossSum

from ._cross_entropy._linear import linear_cross_entropy
from ._pooling import Pooling, pool


class EmbeddingHead(nn.Module):
    """One vector for each sequence.

    Args:
        hidden_size: H.
        pooling: Which vector of the sequence.
        projection: Size of the vector after a linear layer; none: there is no such layer.
        normalize: Whether vectors have length 1 (but zeros stay zeros).
    """

    def __init__(
        self, hidden_size: int, *, pooling: Pooling = "mean", projection: int | None = None, normalize: bool = True
    ) -> None:
        super().__init__()
        self.pooling, self.normalize = pooling, normalize
        self.projection = None if projection is None else nn.Linear(hidden_size, projection, bias=False)

    def forward(self, hidden_BSH: Tensor, *, mask_BS: Tensor | None = None) -> Tensor:
        """(B, D), of the positions that the mask counts, all without one."""
        vectors_BD = pool(hidden_BSH, mask_BS, self.pooling)
        if self.projection is not None:
            vectors_BD = self.projection(vectors_BD)
        return F.normalize(vectors_BD, dim=-1) if self.normalize else vectors_BD


def contrastive_loss(
    queries_BD: Tensor, documents_ND: Tensor, labels_B: Tensor | None = None, *, temperature: float = 0.05
) -> LossSum:
    """Cross-entropy of each query's document among all of them: InfoNCE (van den Oord et al. 2018, equation 4).

    Scores are dot products divided by the temperature. The documents are those of this call: other microbatches and
    ranks add none, so that the loss depends on how a batch is cut.

    Args:
        queries_BD: B queries.
        documents_ND: N documents, of the same dtype.
        labels_B: int64, which document belongs to each query, -100 where none does; by default the i-th to the i-th.
        temperature: Divides the scores.

    Returns:
        The sum over queries, and their number.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be greater than 0")
    if labels_B is None:
        labels_B = torch.arange(len(queries_BD), device=queries_BD.device)
    return linear_cross_entropy(queries_BD / temperature, documents_ND, labels_B)
