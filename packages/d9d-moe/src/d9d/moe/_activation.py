"""What a gated feed-forward layer does between its projections.

Shapes: N rows, I intermediate size.
"""

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._gated import silu_mul, silu_mul_pair


class GatedActivation(Protocol):
    """A gated linear unit without its projections; the result is in the dtype of the rows."""

    def __call__(self, gate_up_N2I: Tensor, probs_N: Tensor | None = None) -> Tensor:
        """Give (N, I) from both projections in one, times the probability of each row if given (fp32 or wider)."""
        ...

    def pair(self, gate_NI: Tensor, up_NI: Tensor, probs_N: Tensor | None = None) -> Tensor:
        """Give the same from two."""
        ...


@attrs.frozen
class SwiGLUActivation:
    """``silu(gate) · up`` (Shazeer, 2020, arXiv:2002.05202), gate above up; a kernel each way on CUDA."""

    def __call__(self, gate_up_N2I: Tensor, probs_N: Tensor | None = None) -> Tensor:
        """See GatedActivation."""
        return silu_mul(gate_up_N2I, probs_N)

    def pair(self, gate_NI: Tensor, up_NI: Tensor, probs_N: Tensor | None = None) -> Tensor:
        """See GatedActivation."""
        return silu_mul_pair(gate_NI, up_NI, probs_N)


@attrs.frozen
class PlainGatedActivation:
    """Any function of gate and up, in plain torch: computed in fp32 or wider, rounded once, computed anew in backward.

    So it keeps no more than a kernel would, but takes more time.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    """Of gate and up, element by element."""

    interleaved: bool = attrs.field(default=False, kw_only=True)
    """Rows of the fused projection are gate, up, gate, up, …; else all of gate above all of up."""

    def __call__(self, gate_up_N2I: Tensor, probs_N: Tensor | None = None) -> Tensor:
        """See GatedActivation."""
        gate_NI, up_NI = (
            gate_up_N2I.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else gate_up_N2I.chunk(2, dim=-1)
        )
        return self.pair(gate_NI, up_NI, probs_N)

    def pair(self, gate_NI: Tensor, up_NI: Tensor, probs_N: Tensor | None = None) -> Tensor:
        """See GatedActivation."""
        out_NI: Tensor = checkpoint(
            self._formula, gate_NI, up_NI, probs_N, use_reentrant=False, preserve_rng_state=False
        )
        return out_NI

    def _formula(self, gate_NI: Tensor, up_NI: Tensor, probs_N: Tensor | None) -> Tensor:
        wide = torch.promote_types(gate_NI.dtype, torch.float32)
        out_NI = self.function(gate_NI.to(wide), up_NI.to(wide))
        return (out_NI if probs_N is None else out_NI * probs_N[..., None]).to(gate_NI.dtype)


@attrs.frozen(kw_only=True)
class ClampedSwiGLU:
    """``gate · sigmoid(alpha · gate) · (up + 1)`` of clamped values, as in gpt-oss.

    A function for `PlainGatedActivation`, which gpt-oss has ``interleaved``.
    """

    alpha: float = 1.702
    """Slope of the sigmoid."""

    limit: float = 7.0
    """Gate is at most this, up within plus and minus this."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute it."""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
