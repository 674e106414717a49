"""Cosines and sines of positions (Su et al., 2021, arXiv:2104.09864).

Shapes: B batch, S positions, R rotary dim.
"""

import attrs
import torch
from torch import Tensor, nn

from ._scaling import RotaryScaling, default_frequencies


@attrs.frozen(kw_only=True)
class RotaryConfig:
    """Frequencies of a rotary embedding."""

    head_dim: int
    """Size of a head; even."""

    base: float = attrs.field(default=10_000.0, validator=attrs.validators.gt(1.0))
    """Dim pair i turns by ``base ** (-2 i / rotary_dim)`` radians per position; above 1."""

    rotary_dim: int | None = None
    """The first so many dims of each head are turned, an even number; None turns all."""

    scaling: RotaryScaling | None = None
    """How frequencies are stretched to longer contexts; None leaves them."""

    interleaved: bool = False
    """Pairs are dims 2 i and 2 i + 1, not i and i + rotary_dim / 2. The table is the same;
    hand this to what applies it."""

    def __attrs_post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"RotaryConfig.head_dim must be even and positive, found {self.head_dim!r}")
        if self.rotary_dim is not None and (not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2):
            raise ValueError(
                "RotaryConfig.rotary_dim must be even, positive and no more than "
                f"head_dim={self.head_dim!r}, found {self.rotary_dim!r}"
            )
        if self.scaling is not None and not isinstance(self.scaling, RotaryScaling):
            raise TypeError(f"RotaryConfig.scaling must be one such as YarnScaling(...), found {self.scaling!r}")


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
        """Return cosines and sines, each (B, S, R) in fp32, for integer positions (B, S).

        Entries i and i + R / 2 are those of pair i, in both layouts; the attention factor of the scaling is in them.
        """
        config = self.config
        dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
        if config.scaling is None:
            frequency = default_frequencies(dim, config.base, position_ids_BS.device)
        else:
            frequency = config.scaling.frequencies(dim, config.base, position_ids_BS)
        # fp32 in this very order of operations: the same table as transformers, bit for bit on the same device.
        angle = position_ids_BS.float()[..., None] * frequency
        angle_BSR = torch.cat([angle, angle], dim=-1)
        cos, sin = angle_BSR.cos(), angle_BSR.sin()
        factor = 1.0 if config.scaling is None else config.scaling.attention_factor
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)
