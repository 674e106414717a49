"""Leaves that exchange, remove and insert dims."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
from torch import Tensor

from .._mapper import Group
from .._names import Pattern, as_pattern, require_same_fields
from .._spec import Region, TensorSpec
from ._one import bind_one


@attrs.frozen
class Transpose:
    """Exchanges two dims of a tensor, and renames it where `output` says so."""

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    dims: tuple[int, int] = attrs.field(default=(0, 1), kw_only=True)
    """The two dims, not negative."""

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)
        if min(self.dims) < 0:
            raise ValueError(f"dims must not be negative, got {self.dims!r}")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return bind_one(self, names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if max(self.dims) >= len(spec.shape):
            raise ValueError(f"cannot exchange dims {self.dims} of {self.input!r}, which is {spec}")
        return {self.output.name: TensorSpec(self._exchange(spec.shape), spec.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [Region(self.input.name, self._exchange(want.offset), self._exchange(want.shape))]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0].transpose(*self.dims)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: tensors[self.input.name].transpose(*self.dims)}

    def inverse(self) -> Transpose:
        return attrs.evolve(self, input=self.output, output=self.input)

    def _exchange(self, values: tuple[int, ...]) -> tuple[int, ...]:
        exchanged = list(values)
        first, second = self.dims
        exchanged[first], exchanged[second] = values[second], values[first]
        return tuple(exchanged)


@attrs.frozen
class Squeeze:
    """Removes a dim of length 1."""

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    dim: int = attrs.field(kw_only=True, validator=attrs.validators.ge(0))
    """The dim that vanishes."""

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return bind_one(self, names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if spec.shape[self.dim : self.dim + 1] != (1,):
            raise ValueError(f"cannot remove dim {self.dim} of {self.input!r}, which is {spec}: its length must be 1")
        return {self.output.name: TensorSpec((*spec.shape[: self.dim], *spec.shape[self.dim + 1 :]), spec.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(self.input.name).with_dim(self.dim, 0, 1)]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0].squeeze(self.dim)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: tensors[self.input.name].squeeze(self.dim)}

    def inverse(self) -> Unsqueeze:
        return Unsqueeze(self.output, self.input, dim=self.dim)


@attrs.frozen
class Unsqueeze:
    """Inserts a dim of length 1: undoes `Squeeze`."""

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    dim: int = attrs.field(kw_only=True, validator=attrs.validators.ge(0))
    """Where the new dim is inserted in the output."""

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return bind_one(self, names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if self.dim > len(spec.shape):
            raise ValueError(f"cannot insert dim {self.dim} in {self.input!r}, which is {spec}")
        return {self.output.name: TensorSpec((*spec.shape[: self.dim], 1, *spec.shape[self.dim :]), spec.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(self.input.name).without_dim(self.dim)]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0].unsqueeze(self.dim)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: tensors[self.input.name].unsqueeze(self.dim)}

    def inverse(self) -> Squeeze:
        return Squeeze(self.output, self.input, dim=self.dim)
