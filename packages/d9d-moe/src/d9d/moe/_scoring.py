"""From logits to scores, and from the scores of the selected experts to their weights.

Shapes: T tokens, E experts, K experts per token.
"""

from typing import Protocol

import attrs
from torch import Tensor


class Scoring(Protocol):
    """How logits are read. All values are fp32 or wider."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Score every expert (T, E); a selection takes the highest."""
        ...

    def weights(self, scores_TK: Tensor) -> Tensor:
        """Weigh the selected experts (T, K) by their scores."""
        ...

    def probabilities(self, logits_TE: Tensor) -> Tensor:
        """Spread each token over all experts (T, E), summing to 1: what balance losses are made of."""
        ...


def _renormalized(scores: Tensor) -> Tensor:
    """Make the last dim sum to 1; where all have vanished, as those of experts that were given may, they stay zeros.

    So does DeepSeek-V3; a softmax of the experts with the highest scores is far from it, and the same to the last bit.
    """
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


@attrs.frozen(kw_only=True)
class SoftmaxScoring:
    """Softmax over all experts, as in Qwen and Mixtral."""

    renormalize: bool = True
    """Make the weights of a token sum to 1; of experts whose scores have all underflowed, to 0."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        """See Scoring."""
        return logits_TE.softmax(-1)

    def weights(self, scores_TK: Tensor) -> Tensor:
        """See Scoring."""
        return _renormalized(scores_TK) if self.renormalize else scores_TK

    def probabilities(self, logits_TE: Tensor) -> Tensor:
        """See Scoring."""
        return logits_TE.softmax(-1)


@attrs.frozen(kw_only=True)
class SigmoidScoring:
    """A sigmoid for each expert by itself (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

    renormalize: bool = True
    """Make the weights of a token sum to 1; of experts whose scores have all underflowed, to 0."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        """See Scoring."""
        return logits_TE.sigmoid()

    def weights(self, scores_TK: Tensor) -> Tensor:
        """See Scoring."""
        return _renormalized(scores_TK) if self.renormalize else scores_TK

    def probabilities(self, logits_TE: Tensor) -> Tensor:
        """See Scoring."""
        return _renormalized(logits_TE.sigmoid())


@attrs.frozen
class SelectedSoftmaxScoring:
    """Softmax over the logits of the selected experts, as in gpt-oss.

    The weights are those of ``SoftmaxScoring(renormalize=True)``, without a softmax over all experts.
    """

    def scores(self, logits_TE: Tensor) -> Tensor:
        """See Scoring."""
        return logits_TE

    def weights(self, scores_TK: Tensor) -> Tensor:
        """See Scoring."""
        return scores_TK.softmax(-1)

    def probabilities(self, logits_TE: Tensor) -> Tensor:
        """See Scoring."""
        return logits_TE.softmax(-1)
