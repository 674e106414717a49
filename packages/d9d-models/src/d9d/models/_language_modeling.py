"""What causal language models share: their inputs, their output and their head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from d9d.attn import AttentionMask
from d9d.parallel import LossSum

from ._cross_entropy._backend import LinearCrossEntropyConfig
from ._cross_entropy._linear import MAX_LOGITS_BYTES, linear_cross_entropy

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


@attrs.frozen(kw_only=True)
class HeadConfig:
    """How a language modelling head scores and is trained; see `linear_cross_entropy`."""

    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary."""

    z_loss: float = 0.0
    """Factor of the squared log-partition in the loss."""

    soft_cap: float | None = None
    """Bound of the logits, in the loss and out of it."""

    backend: LinearCrossEntropyConfig | str | None = None
    """Of the loss: settings or kind; none: the environment says, else the default."""

    max_logits_bytes: int = MAX_LOGITS_BYTES
    """Memory for the logits of a chunk of tokens."""


_PLAIN = HeadConfig()


class LanguageModelingHead(nn.Module):
    """Scores of the next token.

    Args:
        hidden_size: H.
        vocab_size: V; the weight is (V, H).
        config: Loss and scores.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, config: HeadConfig = _PLAIN) -> None:
        super().__init__()
        self.config = config
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
        """Loss of (B, S, H) against labels (B, S), without memory for all logits; without labels the logits."""
        return _score(hidden, self.weight, labels, self.config)


class SegmentedLanguageModelingHead(nn.Module):
    """A head whose vocabulary comes in segments with a weight each: to add tokens beside those of a trained model, say.

    Token ids count through the segments in their order. Each pass puts the weights together, which copies them.

    Args:
        hidden_size: H.
        segments: Number of tokens of each, by name; weights are ``segments.NAME.weight``.
        config: Loss and scores.
    """

    def __init__(self, hidden_size: int, segments: Mapping[str, int], *, config: HeadConfig = _PLAIN) -> None:
        super().__init__()
        self.config = config
        self.segments = nn.ModuleDict(
            {name: LanguageModelingHead(hidden_size, size) for name, size in segments.items()}
        )

    def tie(self, embedding: "SegmentedTokenEmbedding") -> None:
        """Use the weights of an embedding with the same segments from now on.

        Raises:
            ValueError: Its segments are others, or it is parallelized already.
        """
        if list(embedding.segments) != list(self.segments):
            raise ValueError(f"the embedding has the segments {[*embedding.segments]}, the head {[*self.segments]}")
        for head, tokens in zip(self.segments.values(), embedding.segments.values()):
            assert isinstance(head, LanguageModelingHead)
            assert isinstance(tokens, TokenEmbedding)
            head.tie(tokens)

    def forward(self, hidden: Tensor, labels: Tensor | None) -> CausalLMOutput:
        """As of `LanguageModelingHead`."""
        weight = torch.cat([cast("Tensor", segment.weight) for segment in self.segments.values()])
        return _score(hidden, weight, labels, self.config)


class SegmentedTokenEmbedding(nn.Module):
    """An embedding whose vocabulary comes in segments with a weight each; see `SegmentedLanguageModelingHead`."""

    def __init__(self, segments: Mapping[str, int], hidden_size: int) -> None:
        super().__init__()
        self.segments = nn.ModuleDict({name: TokenEmbedding(size, hidden_size) for name, size in segments.items()})

    def forward(self, ids: Tensor) -> Tensor:
        """(..., H) for ids (...)."""
        start, last = 0, len(self.segments) - 1
        found: Tensor | None = None
        for index, segment in enumerate(self.segments.values()):
            assert isinstance(segment, TokenEmbedding)
            is_here = torch.ones_like(ids, dtype=torch.bool)
            if index > 0:  # the first and the last segment get the ids that are in none, and refuse them
                is_here &= ids >= start
            if index < last:
                is_here &= ids < start + segment.num_embeddings
            rows = segment((ids - start).where(is_here, 0)) * is_here[..., None]
            found = rows if found is None else found + rows
            start += segment.num_embeddings
        assert found is not None
        return found


def _score(hidden: Tensor, weight: Tensor, labels: Tensor | None, config: HeadConfig) -> CausalLMOutput:
    if labels is None:
        logits = nn.functional.linear(hidden, weight)
        if config.soft_cap is not None:
            logits = config.soft_cap * torch.tanh(logits / config.soft_cap)
        return CausalLMOutput(logits=logits)
    loss = linear_cross_entropy(
        hidden,
        weight,
        labels,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
        soft_cap=config.soft_cap,
        backend=config.backend,
        max_logits_bytes=config.max_logits_bytes,
    )
    return CausalLMOutput(loss=loss)
