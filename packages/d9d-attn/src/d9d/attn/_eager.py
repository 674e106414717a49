"""The reference: attention spelled out, with every feature, on any device and in any dtype.

Shapes as in AttentionBackend; R = H/G query heads per key head.
"""

import contextlib
from typing import ClassVar

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from ._backend import AttentionBackend, AttentionBackendConfig, Capabilities, attention_backends
from ._feature import Feature
from ._mask import AttentionMask, require_mask


@attrs.frozen
class EagerAttention:
    """The backend: computes in fp32 or wider, holding all scores (B, H, S, T)."""

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
        """Attend; see AttentionBackend."""
        return self.with_lse(
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
        """Attend, and give the log-sum-exp; see AttentionBackend."""
        require_mask(mask)
        with _without_autocast(q_BSHD.device.type):
            batch, queries, heads, _ = q_BSHD.shape
            keys, key_heads = k_BTGD.shape[1:3]
            dtype = torch.promote_types(q_BSHD.dtype, torch.float32)
            q, k, v = q_BSHD.to(dtype), k_BTGD.to(dtype), v_BTGE.to(dtype)
            visibility = mask.visibility(batch=batch, queries=queries, keys=keys, device=q.device, heads=heads)

            scores_BGRST = torch.einsum("bsgrd,btgd->bgrst", q.unflatten(2, (key_heads, heads // key_heads)), k) * scale
            scores_BHST = scores_BGRST.flatten(1, 2)
            if soft_cap is not None:
                scores_BHST = soft_cap * (scores_BHST / soft_cap).tanh()
            if mask.additive is not None:
                scores_BHST = scores_BHST + mask.additive.to(dtype)
            scores_BHST = scores_BHST.masked_fill(~visibility.keys, -torch.inf)
            # The bias may be −inf all over a blind row, and a softmax over nothing but −inf is NaN, its gradient too.
            scores_BHST = scores_BHST.masked_fill(visibility.blind, 0.0)
            blind_lse: Tensor | float = -torch.inf
            if sinks_H is not None:
                sink_BHS1 = sinks_H.to(dtype)[:, None, None].expand(batch, heads, queries, 1)
                scores_BHST = torch.cat([scores_BHST, sink_BHS1], dim=-1)
                blind_lse = sink_BHS1.squeeze(-1)
            lse_BHS = torch.where(visibility.blind.squeeze(-1), blind_lse, scores_BHST.logsumexp(-1))
            weights_BHST = scores_BHST.softmax(-1)[..., :keys].masked_fill(visibility.blind, 0.0)

            weights_BGRST = F.dropout(weights_BHST, dropout).unflatten(1, (key_heads, heads // key_heads))
            out = torch.einsum("bgrst,btge->bsgre", weights_BGRST, v)
            return out.flatten(2, 3).to(q_BSHD.dtype), lse_BHS


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Autocast would multiply in half precision; it knows no meta device."""
    return contextlib.nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


@attrs.frozen(kw_only=True)
class EagerAttentionConfig(AttentionBackendConfig):
    """The reference backend: every feature, but it holds all scores."""

    kind: ClassVar[str] = "eager"
    priority: ClassVar[int | None] = 0
    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(Feature),
    )

    def build(self) -> AttentionBackend:
        """Make the backend."""
        return EagerAttention()


attention_backends.register(EagerAttentionConfig)
