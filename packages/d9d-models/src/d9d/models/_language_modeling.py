"""What causal language models share: their inputs, their output and their head."""

from dataclasses import dataclass

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from d9d.attn import AttentionMask
from d9d.parallel import LossSum

from ._linear_cross_entropy import linear_cross_entropy

INIT_STD = 0.02


@attrs.frozen(kw_only=True)
class CausalLMContext:
    """What every stage of a causal language model knows of a batch, B sequences of S tokens."""

    position_ids: Tensor
    """(B, S), int64; they may restart and carry offsets."""

    labels: Tensor | None = None
    """(B, S), int64: the token that *follows* each position, -100 where there is none. Without labels the model
    returns logits."""

    mask: AttentionMask = attrs.field(factory=AttentionMask)
    """Which positions see which."""


@dataclass(frozen=True, kw_only=True)
class CausalLMOutput:
    """What a causal language model returns: a loss if it was given labels, else logits."""

    loss: LossSum | None = None
    """Summed cross-entropy and the number of labels."""

    logits: Tensor | None = None
    """(B, S, vocabulary)."""


# As a pytree, so that every version of `fully_shard` finds the tensors in what the model returns.
register_dataclass(CausalLMOutput)


class TokenEmbedding(nn.Embedding):
    """An embedding whose initial weights are as small as a language model wants them."""

    def reset_parameters(self) -> None:
        """Draw from a normal distribution of standard deviation 0.02."""
        nn.init.normal_(self.weight, std=INIT_STD)


class LanguageModelingHead(nn.Module):
    """Scores of the next token.

    Args:
        hidden_size: H.
        vocab_size: V; the weight is (V, H).
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from a normal distribution of standard deviation 0.02."""
        nn.init.normal_(self.weight, std=INIT_STD)

    def tie(self, embedding: nn.Embedding) -> None:
        """Use the embedding's weight from now on.

        Raises:
            ValueError: The embedding is parallelized already: its attribute reads as the local tensor.
        """
        if not isinstance(embedding.weight, nn.Parameter):
            raise ValueError("tie a head to its embedding before either is parallelized")  # noqa: TRY004 - of order
        self.weight = embedding.weight

    def forward(self, hidden: Tensor, labels: Tensor | None) -> CausalLMOutput:
        """Loss of (B, S, H) against labels (B, S), without holding all logits; without labels the logits."""
        if labels is None:
            return CausalLMOutput(logits=nn.functional.linear(hidden, self.weight))
        return CausalLMOutput(loss=linear_cross_entropy(hidden, self.weight, labels))
