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
        raise ValueError(f"{attribute.name} must name some of {list(KERNELS)}, best first, found {value!r}")


@attention_backends.register
@attrs.frozen(kw_only=True)
class TorchAttentionConfig(AttentionBackendConfig):
    """torch's scaled_dot_product_attention.

    Plain causal attention takes its fused kernels. Windows, documents and bias go through a mask of (B, 1, S, T), made
    once per AttentionMask.
    """

    kind: ClassVar[str] = "torch"
    priority: ClassVar[int | None] = 10
    capabilities: ClassVar[Capabilities] = Capabilities(features=frozenset(Feature) - {Feature.SINKS})

    kernels: tuple[str, ...] = attrs.field(
        default=("cudnn", "flash", "efficient", "math"), converter=tuple, validator=_check_kernels
    )
    """Kernels to try on CUDA, best first; the first that supports the inputs runs. On an H200, cuDNN takes
    0.55 to 0.6 of FlashAttention's time."""

    def build(self) -> AttentionBackend:
        """Make the backend."""
        return TorchAttention([KERNELS[name] for name in self.kernels])


@attrs.frozen
class TorchAttention:
    """The backend; see TorchAttentionConfig."""

    kernels: list[SDPBackend]
    """Kernels to try on CUDA, best first."""

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
        batch, queries, heads, _ = q_BSHD.shape
        keys, key_heads = k_BTGD.shape[1:3]
        q, k, v = q_BSHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGE.transpose(1, 2)
        grouped = heads != key_heads
        kernels = sdpa_kernel(self.kernels, set_priority=True) if q.is_cuda else contextlib.nullcontext()
        with kernels:
            if mask.is_exactly_causal(queries, keys):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
                return out.transpose(1, 2)
            visibility = mask.visibility(batch=batch, queries=queries, keys=keys, device=q.device)
            # Kernels disagree on rows without any key (zeros, NaN, means): let them see all, then drop the result.
            if mask.additive is None:
                attn_mask = visibility.keys | visibility.blind
            else:
                bias = mask.additive.to(q.dtype).masked_fill(~visibility.keys, float("-inf"))
                attn_mask = bias.masked_fill(visibility.blind, 0.0)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=grouped)
            return out.masked_fill(visibility.blind, 0.0).transpose(1, 2)
