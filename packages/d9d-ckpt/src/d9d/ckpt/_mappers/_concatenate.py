"""Concatenating tensors along a dim, and the reverse."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from .._mapper import Group
from .._names import Pattern, as_pattern, as_patterns, matches, require_same_fields
from .._problems import raise_all
from .._spec import Region, TensorSpec


def _sizes(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _check(many: tuple[Pattern, ...], one: Pattern, sizes: tuple[int, ...]) -> None:
    require_same_fields(one, *many)
    if len(sizes) != len(many) or min(sizes, default=0) < 1:
        raise ValueError(f"{len(many)} tensors need as many positive sizes, got {sizes!r}")


@attrs.frozen
class Concatenate:
    """Concatenates tensors along `dim`; all names have the same fields.

    `Concatenate(["{i}.gate", "{i}.up"], "{i}.gate_up", sizes=(768, 768))`
    """

    inputs: tuple[Pattern, ...] = attrs.field(converter=as_patterns)
    output: Pattern = attrs.field(converter=as_pattern)
    sizes: tuple[int, ...] = attrs.field(kw_only=True, converter=_sizes)
    """Length of each input along `dim`: from them a slice of the output is found without reading anything."""
    dim: int = attrs.field(default=0, kw_only=True, validator=attrs.validators.ge(0))
    """The dim along which the inputs follow each other."""

    def __attrs_post_init__(self) -> None:
        _check(self.inputs, self.output, self.sizes)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [
            attrs.evolve(self, inputs=[input_.fill(values) for input_ in self.inputs], output=self.output.fill(values))
            for values in matches(self.inputs, names)
        ]
        return [Group([input_.name for input_ in leaf.inputs], [leaf.output.name], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        first = specs[self.inputs[0].name]
        if self.dim >= len(first.shape):
            raise ValueError(f"cannot concatenate tensors that are {first} along dim {self.dim} into {self.output!r}")
        raise_all(
            [
                f"cannot concatenate {input_!r}, which is {specs[input_.name]}, into {self.output!r}: "
                f"with {self.inputs[0]!r} it should be {_resized(first, self.dim, size)}"
                for input_, size in zip(self.inputs, self.sizes)
                if specs[input_.name] != _resized(first, self.dim, size)
            ]
        )
        return {self.output.name: _resized(first, self.dim, sum(self.sizes))}

    def pull(self, want: Region) -> Sequence[Region] | None:
        regions = []
        start, end = want.offset[self.dim], want.offset[self.dim] + want.shape[self.dim]
        for input_, base, size in zip(self.inputs, _starts(self.sizes), self.sizes):
            first, last = max(start, base), min(end, base + size)
            if first < last:
                regions.append(want.renamed(input_.name).replaced(self.dim, first - base, last - first))
        return regions

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), self.dim)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: torch.cat([tensors[input_.name] for input_ in self.inputs], self.dim)}

    def inverse(self) -> Chunk:
        return Chunk(self.output, self.inputs, sizes=self.sizes, dim=self.dim)


@attrs.frozen
class Chunk:
    """Cuts a tensor along `dim` into pieces of the given sizes: undoes `Concatenate`."""

    input: Pattern = attrs.field(converter=as_pattern)
    outputs: tuple[Pattern, ...] = attrs.field(converter=as_patterns)
    sizes: tuple[int, ...] = attrs.field(kw_only=True, converter=_sizes)
    """Length of each output along `dim`."""
    dim: int = attrs.field(default=0, kw_only=True, validator=attrs.validators.ge(0))
    """The dim that is cut."""

    def __attrs_post_init__(self) -> None:
        _check(self.outputs, self.input, self.sizes)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [
            attrs.evolve(self, input=self.input.fill(values), outputs=[output.fill(values) for output in self.outputs])
            for values in matches([self.input], names)
        ]
        return [Group([leaf.input.name], [output.name for output in leaf.outputs], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if self.dim >= len(spec.shape) or spec.shape[self.dim] != sum(self.sizes):
            raise ValueError(f"cannot cut {self.input!r}, which is {spec}, along dim {self.dim} into {self.sizes}")
        return {output.name: _resized(spec, self.dim, size) for output, size in zip(self.outputs, self.sizes)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        starts = {output.name: start for output, start in zip(self.outputs, _starts(self.sizes))}
        offset = starts[want.name] + want.offset[self.dim]
        return [want.renamed(self.input.name).replaced(self.dim, offset, want.shape[self.dim])]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0]

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        pieces = tensors[self.input.name].tensor_split(_starts(self.sizes)[1:], self.dim)
        return {output.name: piece for output, piece in zip(self.outputs, pieces)}

    def inverse(self) -> Concatenate:
        return Concatenate(self.outputs, self.input, sizes=self.sizes, dim=self.dim)


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def _resized(spec: TensorSpec, dim: int, length: int) -> TensorSpec:
    return TensorSpec((*spec.shape[:dim], length, *spec.shape[dim + 1 :]), spec.dtype)
