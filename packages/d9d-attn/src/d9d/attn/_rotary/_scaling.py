"""How frequencies are stretched so that contexts may be longer than those of pretraining.

Every scaling keeps the order of operations of transformers in fp32: on the same device its tables are the same bit for
bit. All runs on the device of the positions, without waiting for it.

Shapes: B batch, S positions, P pairs of dims.
"""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor


def default_frequencies(dim: int, base: float | Tensor, device: torch.device) -> Tensor:
    """Radians per position of each of dim / 2 pairs, fp32 (P,): ``base ** (-2 i / dim)``."""
    pair = torch.arange(0, dim, 2, device=device)
    return 1.0 / base ** (pair.float() / dim)


@attrs.frozen(kw_only=True)
class RotaryScaling(abc.ABC):
    """Base of the scalings, a tagged union: an attrs class below it that sets ``kind`` is a member."""

    kind: ClassVar[str]
    """Tag of a member; the union itself has none."""

    _members: ClassVar[dict[str, type[Any]]] = {}

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        """Enter a new member.

        Raises:
            ValueError: Another class has its kind.
        """
        if "kind" not in cls.__dict__:
            return
        other = cls._members.setdefault(cls.kind, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{cls!r} has the kind {cls.kind!r}, which {other!r} already has; choose another kind")
        cls._members[cls.kind] = cls

    @classmethod
    def kinds(cls) -> Mapping[str, type[Any]]:
        """The members, by ``kind``."""
        return MappingProxyType(cls._members)

    @abc.abstractmethod
    def frequencies(self, dim: int, base: float, position_ids_BS: Tensor) -> Tensor:
        """Radians per position of each of dim / 2 pairs, fp32 (P,), on the device of the positions."""

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return 1.0


@attrs.frozen(kw_only=True)
class LinearScaling(RotaryScaling):
    """Position interpolation (Chen et al., 2023, arXiv:2306.15595): every frequency is divided by a factor."""

    factor: float = attrs.field(validator=attrs.validators.ge(1.0))
    """How many times longer the context becomes."""

    kind: ClassVar[str] = "linear"

    def frequencies(self, dim: int, base: float, position_ids_BS: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        return default_frequencies(dim, base, position_ids_BS.device) / self.factor


@attrs.frozen(kw_only=True)
class NTKScaling(RotaryScaling):
    """NTK-aware scaling by the length at hand ("dynamic" in transformers): the base grows with the largest position.

    Within the original length nothing changes. The length is the largest position of this very call plus 1, whatever
    was seen before. Needs a rotary dim above 2.
    """

    factor: float = attrs.field(validator=attrs.validators.ge(1.0))
    """Longer contexts scale the base as if the length were this many times what it is beyond the original one."""

    original_length: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest context of pretraining (``max_position_embeddings``)."""

    kind: ClassVar[str] = "ntk"

    def frequencies(self, dim: int, base: float, position_ids_BS: Tensor) -> Tensor:
        """See `RotaryScaling`.

        Raises:
            ValueError: The rotary dim is 2.
        """
        if dim <= 2:
            raise ValueError(f"NTKScaling needs a rotary dim above 2, found {dim!r}; leave the scaling out")
        if not position_ids_BS.numel():
            return default_frequencies(dim, base, position_ids_BS.device)
        length = position_ids_BS.amax() + 1
        grown = default_frequencies(dim, self._base(base, length, dim), position_ids_BS.device)
        usual = default_frequencies(dim, self._base(base, self.original_length, dim), position_ids_BS.device)
        return torch.where(length > self.original_length, grown, usual)

    def _base(self, base: float, length: Any, dim: int) -> Any:
        # NaN where the length is far below the original one; not chosen then.
        return base * ((self.factor * length / self.original_length) - (self.factor - 1)) ** (dim / (dim - 2))
