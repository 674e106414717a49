"""Attention by torch's flex attention (arXiv:2412.05496): the mask is a function, worked out per block of positions.

Shapes as in AttentionBackend.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from ._backend import AttentionBackend, AttentionBackendConfig, Capabilities, attention_backends
from ._eager import EagerAttention
from ._feature import Feature
from ._flex_mask import bias_at, block_mask_of
from ._head_dims import pad_head_dim
from ._mask import AttentionMask, require_mask
from ._sinks import add_sinks

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
SMALLEST_HEAD_DIM = 16
"""What its kernels multiply at least."""


@attrs.frozen(kw_only=True)
class FlexAttentionConfig(AttentionBackendConfig):
    """torch's flex attention, compiled: no mask of queries × keys is ever held."""

    kind: ClassVar[str] = "flex"
    priority: ClassVar[int | None] = 10
    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(Feature) - {Feature.DROPOUT, Feature.BIAS_GRADIENT},
        device_types=frozenset({"cuda"}),
        cuda_capability=(8, 0),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        max_head_dim=256,
    )

    compiled: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    """Whether to compile it; without, it holds all scores, and is for tests."""

    kernel_options: dict[str, Any] | None = None
    """Passed on, see `torch.nn.attention.flex_attention.FlexKernelOptions`."""

    def build(self) -> AttentionBackend:
        """Make the backend."""
        return FlexAttention(self)


attention_backends.register(FlexAttentionConfig)


@attrs.frozen
class FlexAttention:
    """The backend; see FlexAttentionConfig."""

    config: FlexAttentionConfig
    """Its settings."""

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
        soft_cap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend; see AttentionBackend.

        Raises:
            ValueError: There is dropout, or a bias wants a gradient.
        """
        if sinks_H is not None:
            return self.with_lse(
                q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, sinks_H=sinks_H, soft_cap=soft_cap, dropout=dropout
            )[0]
        return self._attend(q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, soft_cap=soft_cap, dropout=dropout, lse=False)[0]

    def with_lse(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
        soft_cap: float | None = None,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Attend, and give the log-sum-exp; see AttentionBackend.

        Raises:
            ValueError: There is dropout, or a bias wants a gradient.
        """
        out_BSHE, lse_BHS = self._attend(
            q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, soft_cap=soft_cap, dropout=dropout, lse=True
        )
        assert lse_BHS is not None
        return (out_BSHE, lse_BHS) if sinks_H is None else add_sinks(out_BSHE, lse_BHS, sinks_H)

    def _attend(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        soft_cap: float | None,
        dropout: float,
        lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        require_mask(mask)
        if dropout:
            raise ValueError(f"the attention backend 'flex' has no dropout, found {dropout!r}; use 'torch' or 'eager'")
        if mask.bias is not None and mask.bias.requires_grad and torch.is_grad_enabled():
            # torch sums it by atomics, in an order of their own, where it is compiled, and forgets it where it is not.
            raise ValueError("the attention backend 'flex' has no gradient of a bias; use 'torch' or 'eager'")
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: PLC0415 - takes a second to import

        batch, queries, heads, head_dim = q_BSHD.shape
        keys, key_heads, value_dim = v_BTGE.shape[1:]
        if 0 in (batch, queries, keys):  # which its kernels are not for
            return EagerAttention().with_lse(q_BSHD, k_BTGD, v_BTGE, mask, scale=scale)
        compiled = self.config.compiled and not torch.compiler.is_compiling()
        out_BHSE, aux = _flex_attention(compiled=compiled)(
            pad_head_dim(q_BSHD, max(head_dim, SMALLEST_HEAD_DIM)).transpose(1, 2),
            pad_head_dim(k_BTGD, max(head_dim, SMALLEST_HEAD_DIM)).transpose(1, 2),
            pad_head_dim(v_BTGE, max(value_dim, SMALLEST_HEAD_DIM)).transpose(1, 2),
            score_mod=_score_function(mask, soft_cap),
            block_mask=block_mask_of(mask, batch=batch, queries=queries, keys=keys, heads=heads, device=q_BSHD.device),
            scale=scale,
            enable_gqa=heads != key_heads,
            kernel_options=self.config.kernel_options,
            return_aux=AuxRequest(lse=lse),
        )
        return out_BHSE.transpose(1, 2)[..., :value_dim], aux.lse


def _score_function(mask: AttentionMask, soft_cap: float | None) -> ScoreFunction | None:
    bias = mask.additive
    if bias is None and soft_cap is None:
        return None

    def modified(score: Tensor, b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        return score if bias is None else score + bias_at(bias, b, h, s, t).to(score.dtype)

    return modified


def _flex_attention(*, compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - takes a second to import

    if compiled:
        return _compiled(flex_attention)
    return flex_attention


# Once for all layers; torch.compile specializes it by mask and shape.
@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)
