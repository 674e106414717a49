"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), half layout as Hugging Face's Llama and Qwen.

Shapes: B batch, S positions, H query heads, G key heads, D head dim.
"""

import attrs
import torch
from torch import Tensor, nn


@attrs.frozen(kw_only=True)
class RotaryConfig:
    """Frequencies of a rotary embedding."""

    head_dim: int
    """Size of a head; even."""

    base: float = 10_000.0
    """Dim pair i turns by ``base ** (-2 i / head_dim)`` radians per position."""

    def __attrs_post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"RotaryConfig.head_dim must be even and positive, found {self.head_dim!r}")


class RotaryEmbedding(nn.Module):
    """Cosines and sines of position ids.

    The position ids alone decide: they may restart, carry an offset, or pass any length seen in training. Nothing is
    tabulated and the module has no state, so that neither ``.to(bfloat16)`` nor a meta device touches the frequencies.
    """

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, position_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (B, S, D) in fp32, for integer positions (B, S)."""
        pair = torch.arange(0, self.config.head_dim, 2, device=position_ids_BS.device)
        # fp32 in this very order of operations: the same table as transformers, bit for bit on the same device.
        frequency = 1.0 / self.config.base ** (pair.float() / self.config.head_dim)
        angle = position_ids_BS.float()[..., None] * frequency
        angle_BSD = torch.cat([angle, angle], dim=-1)
        return angle_BSD.cos(), angle_BSD.sin()


def apply_rotary(q_BSHD: Tensor, k_BSGD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each pair (i, i + D/2) of every head of q and k by its angle.

    Computed in fp32 or wider and rounded once; each result has the dtype of its input.
    """
    cos, sin = cos_BSD[:, :, None], sin_BSD[:, :, None]
    return _rotate(q_BSHD, cos, sin), _rotate(k_BSGD, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
