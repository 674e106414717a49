"""Attention by torch's own kernels: scaled_dot_product_attention, and varlen_attn for documents and windows.

Shapes as in AttentionBackend.
"""

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

import attrs
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

from ._backend import (
    HALF_PRECISION,
    AttentionBackend,
    AttentionBackendConfig,
    AttentionNeed,
    Capabilities,
    attention_backends,
)
from ._constant import constant
from ._eager import EagerAttention
from ._feature import Feature
from ._head_dims import next_multiple, pad_head_dim
from ._installed import is_installed, is_recent
from ._mask import AttentionMask, require_mask
from ._varlen import sequences_of, window_bounds

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FLASH_IMPLEMENTATIONS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""What torch can put in the place of its FlashAttention 2, and the module each needs."""


def _names(value: Iterable[str] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _check_kernels(_: object, attribute: "attrs.Attribute[tuple[str, ...]]", value: tuple[str, ...]) -> None:
    if not value or not set(value) <= KERNELS.keys():
        raise ValueError(f"{attribute.name} must name some of {list(KERNELS)}, found {value!r}")


@attrs.frozen(kw_only=True)
class TorchAttentionConfig(AttentionBackendConfig):
    """torch's scaled_dot_product_attention, and its varlen_attn for windows and documents in half precision on CUDA.

    Other windows and documents, and any bias, go through a mask of (B, 1, S, T), made once per AttentionMask.
    """

    kind: ClassVar[str] = "torch"
    priority: ClassVar[int | None] = 40
    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(Feature) - {Feature.SINKS, Feature.SOFT_CAP, Feature.LSE, Feature.LSE_GRADIENT},
    )

    kernels: tuple[str, ...] | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_names),
        validator=attrs.validators.optional(_check_kernels),
    )
    """CUDA kernels to try without a mask, best first. None is torch's own order: since 2.11 that is cuDNN first on
    Hopper and Blackwell, where it takes 0.55 to 0.6 of FlashAttention's time, unless cuDNN is older than 9.15.1, which
    is wrong for lengths that are no multiple of 128 (pytorch#169849)."""

    masked_kernels: tuple[str, ...] = attrs.field(
        default=("efficient", "math"), converter=_names, validator=_check_kernels
    )
    """CUDA kernels that may run with a mask, in torch's order. FlashAttention takes none; cuDNN's gradient of q can be
    NaN with one (pytorch#196678), and it has no gradient for a bias."""

    varlen: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    """Whether windows and documents take varlen_attn where they can."""

    flash_implementation: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.in_(FLASH_IMPLEMENTATIONS))
    )
    """FA3 or FA4: torch's FlashAttention kernel is replaced by that of another package, for the whole process, when the
    backend is built, and then comes first unless ``kernels`` says otherwise."""

    def refusal(self, need: AttentionNeed) -> str | None:
        """Say what of the need the capability table does not cover, or that the implementation is missing."""
        if (asked := self.flash_implementation) is not None:
            if asked not in (offered := torch.nn.attention.list_flash_attention_impls()):
                return f"cannot take {asked!r}: torch {torch.__version__} offers {offered}; leave flash_implementation"
            if not is_installed(module := FLASH_IMPLEMENTATIONS[asked]):
                return f"needs {module!r} for {asked!r}, which is not installed; install it or leave it out"
            if asked == "FA4" and TorchVersion(torch.__version__) < "2.12" and is_recent("flash-attn-4>=4.0.0b36"):
                return f"cannot take 'FA4': torch {torch.__version__} knows older ones only; use 'flash_attention_4'"
        return super().refusal(need)

    def build(self) -> AttentionBackend:
        """Make the backend; activates ``flash_implementation``."""
        if self.flash_implementation is not None:
            torch.nn.attention.activate_flash_attention_impl(self.flash_implementation)
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
        soft_cap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend; see AttentionBackend.

        Raises:
            ValueError: Sinks or a soft cap are given, or there are not as many keys as values.
        """
        require_mask(mask)
        if k_BTGD.shape[:3] != v_BTGE.shape[:3]:  # on CPU torch says nothing
            raise ValueError(
                f"there must be a value for each key, found keys of the shape {tuple(k_BTGD.shape)!r} and values of "
                f"{tuple(v_BTGE.shape)!r}"
            )
        if sinks_H is not None or soft_cap is not None:
            raise ValueError("the attention backend 'torch' has no sinks and no soft cap; use 'flex' or 'eager'")
        batch, queries, keys = *q_BSHD.shape[:2], k_BTGD.shape[1]
        if 0 in (batch, queries, keys):  # which kernels for CUDA are not for
            return EagerAttention()(q_BSHD, k_BTGD, v_BTGE, mask, scale=scale)
        if self._suits_varlen(q_BSHD, v_BTGE, mask, dropout):
            return _varlen(q_BSHD, k_BTGD, v_BTGE, mask, scale=scale)
        q, k, v = q_BSHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGE.transpose(1, 2)
        attend = self._plain if mask.is_plain(q.shape[2], k.shape[2]) else self._masked
        return attend(q, k, v, mask, scale=scale, dropout=dropout).transpose(1, 2)

    def _suits_varlen(self, q: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> bool:
        if not self.config.varlen or mask.bias is not None or (mask.window is None and mask.documents is None):
            return False
        fits = q.is_cuda and q.dtype in HALF_PRECISION and max(q.shape[-1], v.shape[-1]) <= 256
        return fits and dropout == 0.0

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float, dropout: float) -> Tensor:
        if q.is_cuda and q.dtype not in HALF_PRECISION:  # only cuDNN and FlashAttention share heads
            k, v = _one_key_head_each(q, k, v)
        kernels = self.config.kernels
        if kernels is None and self.config.flash_implementation is not None:
            kernels = ("flash", "cudnn", "efficient", "math")
        with _kernels(kernels, q, ordered=True):
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=mask.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float, dropout: float) -> Tensor:
        batch, heads, queries = q.shape[:3]
        visibility = mask.visibility(batch=batch, queries=queries, keys=k.shape[2], device=q.device, heads=heads)
        # Kernels disagree on rows without any key (zeros, NaN, means), so blind rows see all and are zeroed at the end.
        attn_mask = visibility.keys
        if mask.additive is not None:
            bias = mask.additive.to(q.dtype).masked_fill(~visibility.keys, float("-inf"))
            attn_mask = bias.masked_fill(visibility.blind, 0.0)
        if q.is_cuda:  # the memory-efficient kernel shares no heads
            k, v = _one_key_head_each(q, k, v)
        with _kernels(self.config.masked_kernels, q, ordered=False):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.masked_fill(visibility.blind, 0.0)


def _varlen(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, mask: AttentionMask, *, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - registers operators, which takes its time

    batch, queries = q_BSHD.shape[:2]
    sequences = sequences_of(mask, batch=batch, queries=queries, keys=k_BTGD.shape[1], device=q_BSHD.device)
    value_dim = v_BTGE.shape[-1]
    head_dim = next_multiple(max(q_BSHD.shape[-1], value_dim), 8)
    q, k, v = (sequences.flatten(pad_head_dim(x, head_dim)) for x in (q_BSHD, k_BTGD, v_BTGE))
    before, after = window_bounds(mask)
    grouped: dict[str, Any] = {"enable_gqa": True} if _varlen_asks_for_groups() else {}
    out = varlen_attn(
        q,
        k,
        v,
        sequences.cu_queries,
        sequences.cu_keys,
        sequences.max_queries,
        sequences.max_keys,
        scale=scale,
        window_size=(-1 if before is None else before, -1 if after is None else after),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return sequences.unflatten(out, (batch, queries))[..., :value_dim]


@constant
def _varlen_asks_for_groups() -> bool:
    """Whether varlen_attn shares heads when told to only; that of torch 2.11 does so untold, and is not to be told."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - see above

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _one_key_head_each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key heads until each query head has its own."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))


def _kernels(kernels: tuple[str, ...] | None, q: Tensor, *, ordered: bool) -> contextlib.AbstractContextManager[object]:
    if kernels is None or not q.is_cuda:
        return contextlib.nullcontext()
    return sdpa_kernel([KERNELS[name] for name in kernels], set_priority=ordered)
