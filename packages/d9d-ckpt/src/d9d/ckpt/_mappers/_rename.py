"""Leaves that pass a tensor on as it is, or with two dims exchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
from torch import Tensor

from .._mapper import Group
from .._names import Pattern, as_pattern, matches, natural_key, require_same_fields
from .._spec import Region, TensorSpec


@attrs.frozen
class Rename:
    """Passes a tensor on under another name.

    Both names may be patterns with the same fields: `Rename("blocks.{i}.attn.{w}", "layers.{i}.attention.{w}")`.
    """

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [Rename(self.input.fill(values), self.output.fill(values)) for values in matches([self.input], names)]
        return [Group([leaf.input.name], [leaf.output.name], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return {self.output.name: specs[self.input.name]}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(self.input.name)]

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        del want  # a slice is renamed like the whole
        return {self.output.name: tensors[self.input.name]}

    def inverse(self) -> Rename:
        return Rename(self.output, self.input)


@attrs.frozen(init=False, repr=False)
class Identity:
    """Passes tensors on as they are: those that one of `patterns` matches, all when there is none."""

    patterns: tuple[Pattern, ...]

    def __init__(self, *patterns: str) -> None:
        object.__setattr__(self, "patterns", tuple(map(as_pattern, patterns)))

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        if not self.patterns:
            return [Group([name], [name], Rename(name, name)) for name in sorted(names, key=natural_key)]
        return [group for pattern in self.patterns for group in Rename(pattern, pattern).bind(names)]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return specs

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want]

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        del want
        return tensors

    def inverse(self) -> Identity:
        return self

    def __repr__(self) -> str:
        return f"Identity({', '.join(map(repr, self.patterns))})"


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
        leaves = [
            attrs.evolve(self, input=self.input.fill(values), output=self.output.fill(values))
            for values in matches([self.input], names)
        ]
        return [Group([leaf.input.name], [leaf.output.name], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if max(self.dims) >= len(spec.shape):
            raise ValueError(f"cannot exchange dims {self.dims} of {self.input!r}, which is {spec}")
        return {self.output.name: TensorSpec(self._exchange(spec.shape), spec.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [Region(self.input.name, self._exchange(want.offset), self._exchange(want.shape))]

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        del want  # a slice is transposed like the whole
        return {self.output.name: tensors[self.input.name].transpose(*self.dims)}

    def inverse(self) -> Transpose:
        return attrs.evolve(self, input=self.output, output=self.input)

    def _exchange(self, values: tuple[int, ...]) -> tuple[int, ...]:
        exchanged = list(values)
        first, second = self.dims
        exchanged[first], exchanged[second] = values[second], values[first]
        return tuple(exchanged)
