"""Attention by torch's scaled_dot_product_attention.

Shapes as in AttentionBackend.
"""

import contextlib
from typing import ClassVar

import attrs
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ._backend import AttentionBackend, AttentionBackendConfig, Capabilities, Feature, attention_backends
from ._mask import AttentionMask

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def _check_kernels(_: object, attribute: "attrs.Attribute[tuple[str, ...]]", value: tuple[str, ...]) -> None:
    if not value or not set(value) <= KERNELS.keys():
        raise ValueError(f"{attribute.name} must name some of {list(KERNELS)}, found {value!r}")


@attrs.frozen(kw_only=True)
class TorchAttentionConfig(AttentionBackendConfig):
    """torch's scaled_dot_product_attention.

    Causal and full attention take its fused kernels. Windows, documents and bias go through a mask of (B, 1, S, T),
    made once per AttentionMask.
    """

    kind: ClassVar[str] = "torch"
    priority: ClassVar[int | None] = 10
    capabilities: ClassVar[Capabilities] = Capabilities(features=frozenset(Feature) - {Feature.SINKS})

    kernels: tuple[str, ...] | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(tuple),
        validator=attrs.validators.optional(_check_kernels),
    )
    """CUDA kernels to try without a mask, best first. None is torch's own order: since 2.11 that is cuDNN first on
    Hopper and Blackwell, where it takes 0.55 to 0.6 of FlashAttention's time, unless cuDNN is older than 9.15.1, which
    is wrong for lengths that are no multiple of 128 (pytorch#169849)."""

    masked_kernels: tuple[str, ...] = attrs.field(
        default=("efficient", "math"), converter=tuple, validator=_check_kernels
    )
    """CUDA kernels that may run with a mask, in torch's order. FlashAttention takes none; cuDNN's gradient of q can be
    NaN with one (pytorch#196678), and it has no gradient for a bias."""

    def build(self) -> AttentionBackend:
        """Make the backend."""
        return TorchAttention(self)


attention_backends.register(TorchAttentionConfig)


@attrs.frozen
class TorchAttention:
    """The backend; see TorchAttentionConfig."""

    config: TorchAttentionConfig
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
    ) -> Tensor:
        """Attend; see AttentionBackend.

        Raises:
            ValueError: Sinks are given.
        """
        if sinks_H is not None:
            raise ValueError("the attention backend 'torch' has no sinks; use 'eager'")
        q, k, v = q_BSHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGE.transpose(1, 2)
        if mask.is_plain(q.shape[2], k.shape[2]):
            return self._plain(q, k, v, causal=mask.causal, scale=scale).transpose(1, 2)
        return self._masked(q, k, v, mask, scale=scale).transpose(1, 2)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        if q.is_cuda and q.dtype.itemsize > 2:  # cuDNN and FlashAttention share heads but take half precision only
            k, v = _one_key_head_each(q, k, v)
        with _kernels(self.config.kernels, q, ordered=True):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float) -> Tensor:
        visibility = mask.visibility(batch=q.shape[0], queries=q.shape[2], keys=k.shape[2], device=q.device)
        # Kernels disagree on rows without any key (zeros, NaN, means), so blind rows see all and are zeroed at the end.
        attn_mask = visibility.keys
        if mask.additive is not None:
            bias = mask.additive.to(q.dtype).masked_fill(~visibility.keys, float("-inf"))
            attn_mask = bias.masked_fill(visibility.blind, 0.0)
        if q.is_cuda:  # the memory-efficient kernel shares no heads
            k, v = _one_key_head_each(q, k, v)
        with _kernels(self.config.masked_kernels, q, ordered=False):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.masked_fill(visibility.blind, 0.0)


def _one_key_head_each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key heads until each query head has its own."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))


def _kernels(kernels: tuple[str, ...] | None, q: Tensor, *, ordered: bool) -> contextlib.AbstractContextManager[object]:
    if kernels is None or not q.is_cuda:
        return contextlib.nullcontext()
    return sdpa_kernel([KERNELS[name] for name in kernels], set_priority=ordered)
