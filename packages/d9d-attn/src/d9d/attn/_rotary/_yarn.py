"""YaRN (Peng et al., 2023, arXiv:2309.00071)."""

import math
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from ._scaling import RotaryScaling


@attrs.frozen(kw_only=True)
class YarnScaling(RotaryScaling):
    """Slow pairs are interpolated, fast ones stay, with a ramp between; attention is sharpened by a factor."""

    factor: float = attrs.field(validator=attrs.validators.gt(0.0))
    """How many times longer the context becomes."""

    original_length: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest context of pretraining (``original_max_position_embeddings``)."""

    beta_fast: float = attrs.field(default=32.0, validator=attrs.validators.gt(0.0))
    """Pairs that turn more often than this within the original length stay as they are."""

    beta_slow: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    """Pairs that turn less often than this are interpolated."""

    truncate: bool = True
    """Whether the ends of the ramp are rounded outwards to whole pairs; gpt-oss does not."""

    fixed_attention_factor: float | None = None
    """Factor of cosines and sines (``attention_factor``); None takes it from ``factor`` and the next two."""

    mscale: float | None = None
    """With mscale_all_dim: the factor is (0.1 · mscale · ln(factor) + 1) / (0.1 · mscale_all_dim · ln(factor) + 1)."""

    mscale_all_dim: float | None = None
    """See mscale; without both the factor is 0.1 · ln(factor) + 1."""

    kind: ClassVar[str] = "yarn"

    def __attrs_post_init__(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YarnScaling.beta_fast must not be below beta_slow, found {self.beta_fast!r} and {self.beta_slow!r}"
            )

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def frequencies(self, dim: int, base: float, position_ids_BS: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        device = position_ids_BS.device
        turn = base ** (torch.arange(0, dim, 2, device=device).float() / dim)
        extrapolated, interpolated = 1.0 / turn, 1.0 / (self.factor * turn)
        low, high = self._ramp(dim, base)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
        kept = 1 - ramp
        return interpolated * (1 - kept) + extrapolated * kept

    def _ramp(self, dim: int, base: float) -> tuple[float, float]:
        """The first and last pair of the ramp; never the same one."""
        low, high = (self._pair(turns, dim, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = max(high, low)  # of a very short original length even the fastest pair turns less than beta_slow times
        return low, high + 0.001 if low == high else high

    def _pair(self, turns: float, dim: int, base: float) -> float:
        """Index of the pair that turns so many times within the original length."""
        return (dim * math.log(self.original_length / (turns * 2 * math.pi))) / (2 * math.log(base))

    def _mscale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0
