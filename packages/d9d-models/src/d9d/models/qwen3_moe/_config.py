"""The shape of a Qwen3-MoE."""

import attrs


@attrs.frozen(kw_only=True)
class Qwen3MoEConfig:
    """Sizes of a Qwen3-MoE in which every layer is a mixture of experts."""

    vocab_size: int
    """Number of tokens."""

    hidden_size: int
    """Width of the residual stream."""

    num_layers: int
    """Decoder layers."""

    num_heads: int
    """Query heads."""

    num_kv_heads: int
    """Key and value heads."""

    head_dim: int
    """Width of a head."""

    num_experts: int
    """Experts of a layer."""

    top_k: int
    """Experts that a token goes to."""

    expert_size: int
    """Inner width of an expert."""

    renormalize: bool = True
    """Whether the probabilities of a token's experts are made to sum to 1."""

    rope_base: float = 1_000_000.0
    """Base of the rotary frequencies."""

    norm_eps: float = 1e-6
    """Added to the mean square in norms."""

    tie_embeddings: bool = False
    """Whether head and embedding are one weight."""

    max_positions: int = 32_768
    """Longest sequence the model is meant for; only written to Hugging Face's config."""

    @property
    def head_cost(self) -> float:
        """What the head costs, in layers: the ratio of the parameters of matrix products that a token meets."""
        return self.hidden_size * self.vocab_size / self._active_of_a_layer

    def flops_per_token(self, sequence: int) -> float:
        """Floating-point operations of one token's forward and backward in a sequence of this length.

        6 for each parameter of a matrix product that the token meets (head in, embedding out), and 6 · layers · heads
        · head_dim · sequence for causal attention, counted once; recomputation is not counted.
        """
        active = self.num_layers * self._active_of_a_layer + self.hidden_size * self.vocab_size
        return 6.0 * active + 6.0 * self.num_layers * self.num_heads * self.head_dim * sequence

    @property
    def _active_of_a_layer(self) -> int:
        """Parameters of a layer's matrix products that a token meets."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        experts = self.hidden_size * (self.num_experts + 3 * self.top_k * self.expert_size)
        return attention + experts
