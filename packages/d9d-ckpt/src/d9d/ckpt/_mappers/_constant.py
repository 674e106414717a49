"""Tensors that are made from nothing, and tensors that nothing is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from .._mapper import Group, Mapper
from .._names import Pattern, as_pattern, matches
from .._spec import Region, TensorSpec


def _shape(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen
class Constant:
    """Makes a tensor that the checkpoint lacks, filled with one value.

    The inverse drops it, whatever has become of it. One for each layer is a matter of `Repeat` with a count.
    """

    output: Pattern = attrs.field(converter=as_pattern)
    shape: tuple[int, ...] = attrs.field(kw_only=True, converter=_shape)
    dtype: torch.dtype = attrs.field(kw_only=True)
    value: float = attrs.field(default=0.0, kw_only=True)
    """Of all elements."""

    def __attrs_post_init__(self) -> None:
        if self.output.fields:
            raise ValueError(f"there are no names from which fields of {self.output!r} could be told: use Repeat")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        del names
        return [Group([], [self.output.name], self)]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        del specs
        return {self.output.name: TensorSpec(self.shape, self.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        del want
        return []

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del parts
        return self._filled(want.shape)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        del tensors
        return {self.output.name: self._filled(self.shape)}

    def inverse(self) -> Drop:
        return Drop(self.output, undo=self)

    def _filled(self, shape: Sequence[int]) -> Tensor:
        # not all dtypes can be filled with a number, but all can be cast to
        return torch.full((), self.value).to(self.dtype).expand(shape).clone(memory_format=torch.contiguous_format)


@attrs.frozen
class Drop:
    """Takes tensors that the model has no use for, and does not read them."""

    input: Pattern = attrs.field(converter=as_pattern)
    undo: Mapper | None = attrs.field(default=None, kw_only=True)
    """What makes them again, such as a `Constant`: the inverse."""

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [attrs.evolve(self, input=self.input.fill(values)) for values in matches([self.input], names)]
        return [Group([leaf.input.name], [], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        del specs
        return {}

    def pull(self, want: Region) -> Sequence[Region] | None:
        raise ValueError(f"{self!r} makes nothing, also not {want.name!r}")

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del parts
        raise ValueError(f"{self!r} makes nothing, also not {want.name!r}")

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        del tensors
        return {}

    def inverse(self) -> Mapper:
        if self.undo is None:
            raise ValueError(f"{self!r} has no inverse: give undo, a mapper that makes the tensor again")
        return self.undo
