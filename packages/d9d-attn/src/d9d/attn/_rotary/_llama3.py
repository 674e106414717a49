"""The scaling of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783)."""

import math
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from ._scaling import RotaryScaling, default_frequencies


@attrs.frozen(kw_only=True)
class Llama3Scaling(RotaryScaling):
    """Long wavelengths are interpolated, short ones stay, and those between are mixed."""

    factor: float = attrs.field(validator=attrs.validators.gt(0.0))
    """How many times longer the context becomes."""

    original_length: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest context of pretraining (``original_max_position_embeddings``)."""

    low_frequency_factor: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    """Pairs that turn fewer times than this within the original length are interpolated."""

    high_frequency_factor: float = attrs.field(default=4.0, validator=attrs.validators.gt(0.0))
    """Pairs that turn more times than this stay as they are; above low_frequency_factor."""

    kind: ClassVar[str] = "llama3"

    def __attrs_post_init__(self) -> None:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                "Llama3Scaling.high_frequency_factor must be above low_frequency_factor, "
                f"found {self.high_frequency_factor!r} and {self.low_frequency_factor!r}"
            )

    def frequencies(self, dim: int, base: float, position_ids_BS: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        low, high, length = self.low_frequency_factor, self.high_frequency_factor, self.original_length
        usual = default_frequencies(dim, base, position_ids_BS.device)
        wavelength = 2 * math.pi / usual
        is_long, is_short = wavelength > length / low, wavelength < length / high
        scaled = torch.where(is_long, usual / self.factor, usual)
        share = (length / wavelength - low) / (high - low)
        mixed = (1 - share) * scaled / self.factor + share * scaled
        return torch.where(~is_short & ~is_long, mixed, scaled)
