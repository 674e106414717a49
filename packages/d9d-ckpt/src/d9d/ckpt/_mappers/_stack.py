"""Stacking tensors of equal shape along a new dim, and the reverse."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from .._mapper import Group
from .._names import Pattern, as_pattern, matches
from .._problems import raise_all
from .._spec import Region, TensorSpec


def _index_field(many: Pattern, one: Pattern) -> str:
    """The field that counts: the one that `many` has and `one` lacks."""
    extra = many.fields - one.fields
    if len(extra) != 1 or not one.fields < many.fields:
        raise ValueError(f"{many!r} must have the fields of {one!r} and one more, which counts")
    return next(iter(extra))


def _numbered(many: Pattern, index: str, count: int) -> tuple[str, ...]:
    return tuple(many.fill({index: str(number)}).name for number in range(count))


@attrs.frozen
class Stack:
    """Stacks `count` tensors along a new dim, in the order of their numbers.

    `Stack("layers.{layer}.experts.{expert}.up.weight", "layers.{layer}.experts.up", count=128)` makes a group of 128
    inputs for each layer: the field that only the input has runs from 0 to `count - 1`.
    """

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    count: int = attrs.field(kw_only=True, validator=attrs.validators.ge(1))
    """How many tensors make one; fewer in the checkpoint is an error, further ones are left unread."""
    dim: int = attrs.field(default=0, kw_only=True, validator=attrs.validators.ge(0))
    """Where the new dim is inserted in the output."""
    _index: str = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_index", _index_field(self.input, self.output))

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [
            attrs.evolve(self, input=self.input.fill(values), output=self.output.fill(values))
            for values in matches([self.input], names, without=self._index)
        ]
        return [Group(leaf.inputs, [leaf.output.name], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        first = specs[self.inputs[0]]
        raise_all(
            [
                f"cannot stack {name!r}, which is {specs[name]}, on {self.inputs[0]!r}, which is {first}"
                for name in self.inputs
                if specs[name] != first
            ]
        )
        if self.dim > len(first.shape):
            raise ValueError(f"cannot stack tensors that are {first} along dim {self.dim} into {self.output!r}")
        shape = (*first.shape[: self.dim], self.count, *first.shape[self.dim :])
        return {self.output.name: TensorSpec(shape, first.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        start, length = want.offset[self.dim], want.shape[self.dim]
        part = want.without_dim(self.dim)
        return [part.renamed(name) for name in self.inputs[start : start + length]]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return torch.stack(list(parts), self.dim)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: torch.stack([tensors[name] for name in self.inputs], self.dim)}

    def inverse(self) -> Unstack:
        return Unstack(self.output, self.input, count=self.count, dim=self.dim)

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of what is stacked, in order."""
        return _numbered(self.input, self._index, self.count)


@attrs.frozen
class Unstack:
    """Cuts a tensor into the `count` slices of a dim, each under its number: undoes `Stack`."""

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    count: int = attrs.field(kw_only=True, validator=attrs.validators.ge(1))
    """Length of the dim."""
    dim: int = attrs.field(default=0, kw_only=True, validator=attrs.validators.ge(0))
    """The dim that is cut and vanishes."""
    _index: str = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_index", _index_field(self.output, self.input))

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [
            attrs.evolve(self, input=self.input.fill(values), output=self.output.fill(values))
            for values in matches([self.input], names)
        ]
        return [Group([leaf.input.name], leaf.outputs, leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if self.dim >= len(spec.shape) or spec.shape[self.dim] != self.count:
            raise ValueError(f"cannot unstack {self.count} along dim {self.dim} of {self.input!r}, which is {spec}")
        return dict.fromkeys(
            self.outputs, TensorSpec((*spec.shape[: self.dim], *spec.shape[self.dim + 1 :]), spec.dtype)
        )

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(self.input.name).with_dim(self.dim, self._numbers[want.name], 1)]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0].squeeze(self.dim)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return dict(zip(self.outputs, tensors[self.input.name].unbind(self.dim)))

    def inverse(self) -> Stack:
        return Stack(self.output, self.input, count=self.count, dim=self.dim)

    @functools.cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the slices, in order."""
        return _numbered(self.output, self._index, self.count)

    @functools.cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.outputs)}
