"""Attention by the package flash-attn-4, FlashAttention for Hopper and Blackwell in the CuTe language.

Shapes as in AttentionBackend.
"""

import inspect
from collections.abc import Callable
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from ._backend import (
    HALF_PRECISION,
    AttentionBackend,
    AttentionBackendConfig,
    AttentionNeed,
    Capabilities,
    attention_backends,
)
from ._feature import Feature
from ._head_dims import next_multiple, pad_head_dim
from ._mask import AttentionMask, require_mask
from ._varlen import sequences_of, window_bounds

_MODULE = "flash_attn.cute"
_CONSUMER_BLACKWELL = (12, 0)
_BLACKWELL_HEAD_DIM = 128
"""Its kernels there take this range and a few pairs beyond, such as 192 and 128, of which we make no use."""


@attrs.frozen(kw_only=True)
class FlashAttention4Config(AttentionBackendConfig):
    """FlashAttention 4, from the package flash-attn-4 4.0.0b36 or newer."""

    kind: ClassVar[str] = "flash_attention_4"
    priority: ClassVar[int | None] = 50  # faster than torch on an H200 in every case of the README
    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(Feature)
        - {Feature.BOOLEAN_BIAS, Feature.ADDITIVE_BIAS, Feature.BIAS_GRADIENT, Feature.DROPOUT},
        device_types=frozenset({"cuda"}),
        cuda_capability=(9, 0),
        dtypes=HALF_PRECISION,
        max_head_dim=256,
        requires=_MODULE,
        distribution="flash-attn-4>=4.0.0b36",  # flash-attn 2.8 brings an older module of the same name
        install="d9d-attn[flash-attn-4]",
    )

    deterministic: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether gradients are the same in each run, as under torch.use_deterministic_algorithms; slower."""

    def refusal(self, need: AttentionNeed) -> str | None:
        """Say what of the need the capability table does not cover, or the kernels for Blackwell."""
        if (refusal := super().refusal(need)) is not None or need.device_type != "cuda":
            return refusal
        capability = torch.cuda.get_device_capability()
        if capability >= _CONSUMER_BLACKWELL:
            return f"has no gradient of sinks on compute capability {capability} and has not run there; choose another"
        if need.head_dim is not None and need.head_dim > _BLACKWELL_HEAD_DIM and capability >= (10, 0):
            return f"takes head dims up to {_BLACKWELL_HEAD_DIM} on Blackwell, not {need.head_dim!r}; choose another"
        return None

    def build(self) -> AttentionBackend:
        """Make the backend.

        Raises:
            ImportError: The package is not installed.
        """
        from ._flash_4_operators import flash_attention_4_operator, kernels  # noqa: PLC0415 - operators take a second

        try:
            found = kernels()
        except ImportError as error:
            raise ImportError(f"{self.kind!r} needs {_MODULE!r}; install {self.capabilities.install!r}") from error
        if "dlse" not in inspect.signature(found._flash_attn_bwd).parameters:  # noqa: SLF001 - see the operators
            raise ImportError(
                f"{self.kind!r} needs {_MODULE!r} of {self.capabilities.distribution!r}, found the one that flash-attn "
                "2 brings; install flash-attn-4 after flash-attn, or choose another backend"
            )
        return FlashAttention4(self, flash_attention_4_operator)


attention_backends.register(FlashAttention4Config)


@attrs.frozen
class FlashAttention4:
    """The backend; see FlashAttention4Config."""

    config: FlashAttention4Config
    """Its settings."""

    operator: Callable[..., tuple[Tensor, Tensor]]
    """The package's kernels."""

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
            ValueError: The mask has a bias, or there is dropout.
        """
        return self._attend(
            q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, sinks_H=sinks_H, soft_cap=soft_cap, dropout=dropout
        )[0]

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
            ValueError: The mask has a bias, or there is dropout.
        """
        return self._attend(
            q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, sinks_H=sinks_H, soft_cap=soft_cap, dropout=dropout
        )

    def _attend(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        sinks_H: Tensor | None,
        soft_cap: float | None,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        require_mask(mask)
        if mask.bias is not None or dropout:
            raise ValueError(
                "the attention backend 'flash_attention_4' has no bias and no dropout; use 'torch', 'flex' or 'eager'"
            )
        head_dim, value_dim = q_BSHD.shape[-1], v_BTGE.shape[-1]
        padded_dim, padded_value_dim = _padded(head_dim, value_dim, is_grouped=q_BSHD.shape[2] != k_BTGD.shape[2])
        q, k = pad_head_dim(q_BSHD, padded_dim), pad_head_dim(k_BTGD, padded_dim)
        v = pad_head_dim(v_BTGE, padded_value_dim)
        before, after = window_bounds(mask)
        deterministic = self.config.deterministic or torch.are_deterministic_algorithms_enabled()
        settings = (scale, soft_cap or 0.0, mask.causal, before, after, deterministic)
        if mask.documents is None:
            out_BSHE, lse_BHS = self.operator(q, k, v, sinks_H, None, None, None, None, *settings)
            return out_BSHE[..., :value_dim], lse_BHS
        batch, queries = q.shape[:2]
        sequences = sequences_of(mask, batch=batch, queries=queries, keys=k.shape[1], device=q.device)
        cu_queries, cu_keys, max_queries, max_keys, _ = sequences
        q, k, v = (sequences.flatten(x) for x in (q, k, v))
        out_NHE, lse_HN = self.operator(q, k, v, sinks_H, cu_queries, cu_keys, max_queries, max_keys, *settings)
        lse_BHS = lse_HN.unflatten(1, (batch, queries)).transpose(0, 1)
        return sequences.unflatten(out_NHE, (batch, queries))[..., :value_dim], sequences.fill_padding_lse(
            lse_BHS, sinks_H
        )


def _padded(head_dim: int, value_dim: int, *, is_grouped: bool) -> tuple[int, int]:
    """The nearest dims that its kernels are right for on Hopper; they take multiples of 8 (4.0.0b36).

    Gradients of grouped heads want both dims alike, other dims than multiples of 32 get wrong ones, and two that differ
    compile as multiples of 64 only.
    """
    if is_grouped:
        head_dim = value_dim = max(head_dim, value_dim)
    step = 32 if head_dim == value_dim else 64
    return next_multiple(head_dim, step), next_multiple(value_dim, step)
