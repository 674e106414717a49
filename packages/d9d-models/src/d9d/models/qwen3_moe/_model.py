"""The model, as the report draws it.

Shapes: B sequences, S tokens of each, H hidden size.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from d9d.attn import (
    AttentionMask,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RMSNorm,
    RotaryConfig,
    RotaryEmbedding,
)
from d9d.moe import GroupedSwiGLU, MoELayer, TopKRouter

from .._language_modeling import CausalLMContext, CausalLMOutput, LanguageModelingHead, TokenEmbedding
from ._config import Qwen3MoEConfig


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
            TopKRouter(config.hidden_size, config.num_experts, config.top_k, renormalize=config.renormalize),
            GroupedSwiGLU(config.num_experts, config.hidden_size, config.expert_size),
        )

    def forward(self, x_BSH: Tensor, *, cos: Tensor, sin: Tensor, mask: AttentionMask) -> Tensor:
        """One layer of the residual stream; ``cos`` and ``sin`` as `RotaryEmbedding` gives them."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos=cos, sin=sin, mask=mask)
        y_BSH: Tensor = x_BSH + self.moe(self.moe_norm(x_BSH))
        return y_BSH


class Qwen3MoEForCausalLM(nn.Module):
    """Qwen3-MoE with a language modelling head."""

    def __init__(self, config: Qwen3MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(RotaryConfig(head_dim=config.head_dim, base=config.rope_base))
        # Keyed by number: a part of the model keeps the names of the whole.
        self.layers = nn.ModuleDict({str(i): Qwen3MoELayer(config) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = LanguageModelingHead(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.head.tie(self.embedding)

    def decoder_layers(self) -> Iterator[Qwen3MoELayer]:
        """The layers of this model or part of one, in order."""
        for layer in self.layers.values():
            assert isinstance(layer, Qwen3MoELayer)
            yield layer

    def forward(self, inputs: Tensor, shared: CausalLMContext) -> CausalLMOutput:
        """Loss or logits of token ids (B, S); see `CausalLMContext`."""
        x_BSH = self.embedding(inputs)
        cos, sin = self.rotary(shared.position_ids)
        for layer in self.decoder_layers():
            x_BSH = layer(x_BSH, cos=cos, sin=sin, mask=shared.mask)
        output: CausalLMOutput = self.head(self.norm(x_BSH), shared.labels)
        return output
