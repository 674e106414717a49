"""Grouped-query attention.

Shapes: B batch, S positions, H hidden size; heads are split as in AttentionBackend.
"""

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from ._backend import AttentionBackendConfig, AttentionNeed
from ._feature import Feature
from ._mask import AttentionMask, require_mask
from ._norm import RMSNorm
from ._norm_rotary import norm_and_rotate
from ._selection import BackendSelector


def _check_positive(_: object, attribute: "attrs.Attribute[Any]", value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"GroupedQueryAttentionConfig.{attribute.name} must be positive, found {value!r}")


def _check_probability(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"GroupedQueryAttentionConfig.{attribute.name} must be in [0, 1), found {value!r}")


@attrs.frozen(kw_only=True)
class GroupedQueryAttentionConfig:
    """Shape and flavour of a grouped-query attention block.

    How much of a head is rotated is said by the tables that the block is given, see `RotaryConfig.rotary_dim`.
    """

    hidden_size: int = attrs.field(validator=_check_positive)
    """Size of the residual stream."""

    num_heads: int = attrs.field(validator=_check_positive)
    """Query heads; a multiple of num_kv_heads."""

    num_kv_heads: int = attrs.field(validator=_check_positive)
    """Key and value heads."""

    head_dim: int = attrs.field(validator=_check_positive)
    """Size of each head of queries and keys."""

    value_head_dim: int | None = attrs.field(default=None, validator=_check_positive)
    """Size of each head of values; None is head_dim."""

    qk_norm: bool = False
    """Normalize each head of q and k before the rotation (RMSNorm over head_dim)."""

    zero_centered_norm: bool = False
    """These norms multiply by ``1 + weight``."""

    norm_eps: float = 1e-6
    """eps of these norms."""

    interleaved_rotary: bool = False
    """Rotation turns dims 2 i and 2 i + 1, not i and i + rotary_dim / 2."""

    output_gate: bool = False
    """Multiply what is attended by the sigmoid of a projection of x, which q_proj holds: of each head's rows the first
    head_dim make its query, the other value_head_dim its gate (as in Qwen3-Next)."""

    fused_qkv: bool = False
    """One matrix qkv_proj: the rows of q_proj, then those of k_proj, then those of v_proj."""

    qkv_bias: bool = False
    """Biases in q_proj, k_proj and v_proj."""

    output_bias: bool = False
    """Bias in o_proj."""

    window: int | None = attrs.field(default=None, validator=_check_positive)
    """A query sees keys less than this many positions away, whatever more the mask shows."""

    sinks: bool = False
    """Learn per query head the score of one more key whose value is zero (as in gpt-oss)."""

    soft_cap: float | None = attrs.field(default=None, validator=_check_positive)
    """A score x becomes ``soft_cap · tanh(x / soft_cap)``."""

    dropout: float = attrs.field(default=0.0, validator=_check_probability)
    """Probability by which an attention weight is dropped in training."""

    scale: float | None = attrs.field(default=None, validator=_check_positive)
    """Factor of the scores; None is 1/sqrt(head_dim)."""

    backend: AttentionBackendConfig | str | None = None
    """Attention backend or its kind; None leaves it to D9D_ATTN_BACKEND, else to the automatic choice."""

    def __attrs_post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, found {self.num_heads!r} and {self.num_kv_heads!r}"
            )
        if self.zero_centered_norm and not self.qk_norm:
            raise ValueError("zero_centered_norm is about the norms of q and k, which qk_norm=False leaves out")

    def need(self) -> AttentionNeed:
        """What a block asks of its backend, before the mask is known."""
        value_dim = self.value_head_dim or self.head_dim
        wanted = {
            Feature.GROUPED_QUERY: self.num_heads != self.num_kv_heads,
            Feature.VALUE_DIM: value_dim != self.head_dim,
            Feature.WINDOW: self.window is not None,
            Feature.SINKS: self.sinks,
            Feature.SOFT_CAP: self.soft_cap is not None,
            Feature.DROPOUT: self.dropout > 0,
        }
        return AttentionNeed(
            features=frozenset(feature for feature, is_wanted in wanted.items() if is_wanted),
            head_dim=max(self.head_dim, value_dim),
        )


class GroupedQueryAttention(nn.Module):
    """Attention with rotary positions, where several query heads share a key head (arXiv:2305.13245).

    A backend that was asked for is checked when the block is built; the automatic choice follows the device and dtype
    of the input, and the mask.

    Raises:
        ValueError: The backend asked for is unknown, not installed, or cannot do what the block needs.
    """

    def __init__(self, config: GroupedQueryAttentionConfig) -> None:
        super().__init__()
        self.config = config
        head_dim, value_dim = config.head_dim, config.value_head_dim or config.head_dim
        self._query_dim = head_dim + (value_dim if config.output_gate else 0)
        self._sizes = (
            config.num_heads * self._query_dim,
            config.num_kv_heads * head_dim,
            config.num_kv_heads * value_dim,
        )
        if config.fused_qkv:
            self.qkv_proj = nn.Linear(config.hidden_size, sum(self._sizes), bias=config.qkv_bias)
        else:
            q_size, k_size, v_size = self._sizes
            self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
            self.k_proj = nn.Linear(config.hidden_size, k_size, bias=config.qkv_bias)
            self.v_proj = nn.Linear(config.hidden_size, v_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * value_dim, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, eps=config.norm_eps, zero_centered=config.zero_centered_norm)
            self.k_norm = RMSNorm(head_dim, eps=config.norm_eps, zero_centered=config.zero_centered_norm)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.scale = head_dim**-0.5 if config.scale is None else config.scale
        self._selector = BackendSelector(config.backend, config.need())
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the sinks to zero; the parts reset themselves."""
        if self.sinks is not None:
            self.sinks.zero_()

    def forward(self, x_BSH: Tensor, *, cos: Tensor, sin: Tensor, mask: AttentionMask) -> Tensor:
        """Attend within x.

        Args:
            x_BSH: Input.
            cos: (B, S, rotary_dim), from RotaryEmbedding.
            sin: Likewise.
            mask: Who sees whom; one value for all layers of a model.

        Raises:
            ValueError: The backend asked for cannot do what the mask needs, or nothing can.
            TypeError: The mask is None or a tensor.
        """
        require_mask(mask)
        config = self.config
        q_BSHD, k_BSGD, v_BSGE, gate_BSHE = self._project(x_BSH)
        q_BSHD, k_BSGD = norm_and_rotate(
            q_BSHD,
            k_BSGD,
            cos,
            sin,
            q_weight=self.q_norm.weight if config.qk_norm else None,
            k_weight=self.k_norm.weight if config.qk_norm else None,
            eps=config.norm_eps,
            zero_centered=config.zero_centered_norm,
            interleaved=config.interleaved_rotary,
        )
        mask = mask.within(config.window)
        out_BSHE = self._selector.backend(q_BSHD, mask)(
            q_BSHD,
            k_BSGD,
            v_BSGE,
            mask,
            scale=self.scale,
            sinks_H=self.sinks,
            soft_cap=config.soft_cap,
            dropout=config.dropout if self.training else 0.0,
        )
        if gate_BSHE is not None:
            out_BSHE = out_BSHE * gate_BSHE.sigmoid()
        y_BSH: Tensor = self.o_proj(out_BSHE.flatten(-2))
        return y_BSH

    def _project(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and the output's gate."""
        config = self.config
        if config.fused_qkv:
            q, k, v = self.qkv_proj(x_BSH).split(self._sizes, dim=-1)
        else:
            q, k, v = self.q_proj(x_BSH), self.k_proj(x_BSH), self.v_proj(x_BSH)
        q = q.unflatten(-1, (config.num_heads, self._query_dim))
        k = k.unflatten(-1, (config.num_kv_heads, -1))
        v = v.unflatten(-1, (config.num_kv_heads, -1))
        if not config.output_gate:
            return q, k, v, None
        q, gate = q.split([config.head_dim, self._query_dim - config.head_dim], dim=-1)
        return q, k, v, gate
