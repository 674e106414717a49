"""Grouped-query attention.

Shapes: B batch, S positions, H hidden size; heads are split as in AttentionBackend.
"""

import attrs
import torch
from torch import Tensor, nn

from ._backend import AttentionBackend, AttentionBackendConfig, AttentionNeed, Feature, attention_backends
from ._mask import AttentionMask
from ._norm import RMSNorm
from ._norm_rotary import apply_rotary


@attrs.frozen(kw_only=True)
class GroupedQueryAttentionConfig:
    """Shape and flavour of a grouped-query attention block."""

    hidden_size: int
    """Size of the residual stream."""

    num_heads: int
    """Query heads; a multiple of num_kv_heads."""

    num_kv_heads: int
    """Key and value heads."""

    head_dim: int
    """Size of each head."""

    qk_norm: bool = False
    """Normalize each head of q and k before the rotation (RMSNorm over head_dim)."""

    norm_eps: float = 1e-6
    """eps of these norms."""

    qkv_bias: bool = False
    """Biases in q_proj, k_proj and v_proj."""

    output_bias: bool = False
    """Bias in o_proj."""

    scale: float | None = None
    """Factor of the scores; None is 1/sqrt(head_dim)."""

    backend: AttentionBackendConfig | str | None = None
    """Attention backend or its kind; None leaves it to D9D_ATTN_BACKEND, else to the automatic choice."""

    def __attrs_post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, found {self.num_heads!r} and {self.num_kv_heads!r}"
            )


class GroupedQueryAttention(nn.Module):
    """Attention with rotary positions, where several query heads share a key head (arXiv:2305.13245).

    A backend that was asked for is checked when the block is built; the automatic choice follows the device and dtype
    of the input.

    Raises:
        ValueError: The backend asked for is unknown, not installed, or cannot do what the block needs.
    """

    def __init__(self, config: GroupedQueryAttentionConfig) -> None:
        super().__init__()
        self.config = config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.scale = config.head_dim**-0.5 if config.scale is None else config.scale

        grouped = config.num_heads != config.num_kv_heads
        self._need = AttentionNeed(features=frozenset({Feature.GROUPED_QUERY} if grouped else ()))
        attention_backends.choose(config.backend, self._need)
        self._backends: dict[tuple[str, torch.dtype], AttentionBackend] = {}

    def forward(self, x_BSH: Tensor, *, cos: Tensor, sin: Tensor, mask: AttentionMask) -> Tensor:
        """Attend within x.

        Args:
            x_BSH: Input.
            cos: (B, S, head_dim), from RotaryEmbedding.
            sin: Likewise.
            mask: Who sees whom; one value for all layers with the same mask.
        """
        head_dim = self.config.head_dim
        q_BSHD = self.q_norm(self.q_proj(x_BSH).unflatten(-1, (-1, head_dim)))
        k_BSGD = self.k_norm(self.k_proj(x_BSH).unflatten(-1, (-1, head_dim)))
        v_BSGD = self.v_proj(x_BSH).unflatten(-1, (-1, head_dim))
        q_BSHD, k_BSGD = apply_rotary(q_BSHD, k_BSGD, cos, sin)
        backend = self._backend(q_BSHD.device.type, q_BSHD.dtype)
        out_BSHD = backend(q_BSHD, k_BSGD, v_BSGD, mask, scale=self.scale)
        y_BSH: Tensor = self.o_proj(out_BSHD.flatten(-2))
        return y_BSH

    def _backend(self, device_type: str, dtype: torch.dtype) -> AttentionBackend:
        """Choose once per device type and dtype."""
        if (device_type, dtype) not in self._backends:
            need = attrs.evolve(self._need, device_type=device_type, dtype=dtype)
            choice = attention_backends.choose(self.config.backend, need)
            self._backends[device_type, dtype] = choice.config.build()
        return self._backends[device_type, dtype]
