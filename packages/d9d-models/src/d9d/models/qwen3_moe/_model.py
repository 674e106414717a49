"""The model, as the report draws it.

Shapes: B sequences, S tokens of each, H hidden size.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from d9d.attn import (
    AttentionMask,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RMSNorm,
    RotaryConfig,
    RotaryEmbedding,
)
from d9d.moe import GroupedSwiGLU, MoELayer, SoftmaxScoring, TopKRouter
from d9d.parallel import StageInfo
from d9d.parallel.pipeline import distribute_layers

from .._language_modeling import CausalLMContext, CausalLMOutput, LanguageModelingHead, TokenEmbedding
from ._config import Qwen3MoEConfig

_WHOLE = StageInfo()
_EMBEDDING = "embedding"


class Qwen3MoELayer(nn.Module):
    """Attention and mixture of experts, each after a norm and added to the residual stream."""

    def __init__(self, config: Qwen3MoEConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = GroupedQueryAttention(
            GroupedQueryAttentionConfig(
                hidden_size=config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                qk_norm=True,
                norm_eps=config.norm_eps,
            )
        )
        self.moe_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.moe = MoELayer(
            TopKRouter(
                config.hidden_size,
                config.num_experts,
                config.top_k,
                scoring=SoftmaxScoring(renormalize=config.renormalize),
            ),
            GroupedSwiGLU(config.num_experts, config.hidden_size, config.expert_size),
        )

    def forward(self, x_BSH: Tensor, *, cos: Tensor, sin: Tensor, mask: AttentionMask) -> Tensor:
        """One layer of the residual stream; ``cos`` and ``sin`` as `RotaryEmbedding` gives them."""
        attended_BSH = self.attention(self.attention_norm(x_BSH), cos=cos, sin=sin, mask=mask)
        normed_BSH, x_BSH = self.moe_norm.add(attended_BSH, x_BSH)
        y_BSH: Tensor = x_BSH + self.moe(normed_BSH)
        return y_BSH


class Qwen3MoEForCausalLM(nn.Module):
    """Qwen3-MoE with a language modelling head, or one stage of it; names are those of the whole.

    Args:
        config: The whole model.
        stage: Which part of it; the first one holds the embedding, the last one norm and head.
    """

    def __init__(self, config: Qwen3MoEConfig, stage: StageInfo = _WHOLE) -> None:
        super().__init__()
        self.config, self.stage = config, stage
        if stage.is_first:
            self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(RotaryConfig(head_dim=config.head_dim, base=config.rope_base))
        layers = distribute_layers(config.num_layers, stage.count, last=config.head_cost)[stage.index]
        self.layers = nn.ModuleDict({str(i): Qwen3MoELayer(config) for i in layers})
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.head = LanguageModelingHead(config.hidden_size, config.vocab_size)
            if config.tie_embeddings and stage.is_first:
                self.head.tie(self.embedding)

    def decoder_layers(self) -> Iterator[Qwen3MoELayer]:
        """The layers of this stage, in order."""
        for layer in self.layers.values():
            assert isinstance(layer, Qwen3MoELayer)
            yield layer

    def tied_parameters(self) -> Mapping[str, str]:
        """The embedding's weight and the head's, where they are one and lie on different stages."""
        if not self.config.tie_embeddings or self.stage.is_first == self.stage.is_last:
            return {}
        return {_EMBEDDING: "embedding.weight" if self.stage.is_first else "head.weight"}

    def forward(self, inputs: Tensor, shared: CausalLMContext) -> Tensor | CausalLMOutput:
        """Loss or logits, see `CausalLMContext`; of a stage that is not the last, what goes to the next one.

        Args:
            inputs: Token ids (B, S); on a stage that is not the first, the (B, S, H) of the one before.
            shared: The same on every stage.
        """
        x_BSH = self.embedding(inputs) if self.stage.is_first else inputs
        cos, sin = self.rotary(shared.position_ids)
        for layer in self.decoder_layers():
            x_BSH = layer(x_BSH, cos=cos, sin=sin, mask=shared.mask)
        return self.head(self.norm(x_BSH), shared.labels) if self.stage.is_last else x_BSH
