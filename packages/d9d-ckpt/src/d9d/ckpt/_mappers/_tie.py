"""One tensor on disk that has several names in the model, such as an embedding that is also the head."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from .._mapper import Group
from .._name_index import Names
from .._names import Pattern, as_pattern, as_patterns, matches, require_same_fields
from .._problems import raise_all
from .._spec import Region, TensorSpec


def _check(one: Pattern, many: tuple[Pattern, ...]) -> None:
    require_same_fields(one, *many)
    if len(set(many)) < len(many) or not many:
        raise ValueError(f"one or more different names are tied, got {list(many)!r}")


@attrs.frozen
class Tie:
    """Passes one tensor on under several names: `Tie("model.embed.weight", ["embedding.weight", "head.weight"])`."""

    input: Pattern = attrs.field(converter=as_pattern)
    outputs: tuple[Pattern, ...] = attrs.field(converter=as_patterns)

    def __attrs_post_init__(self) -> None:
        _check(self.input, self.outputs)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        leaves = [
            Tie(self.input.fill(values), [output.fill(values) for output in self.outputs])
            for values in matches([self.input], names)
        ]
        return [Group([leaf.input.name], [output.name for output in leaf.outputs], leaf) for leaf in leaves]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return {output.name: specs[self.input.name] for output in self.outputs}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(self.input.name)]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0]

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {output.name: tensors[self.input.name] for output in self.outputs}

    def inverse(self) -> Untie:
        return Untie(self.outputs, self.input)


@attrs.frozen
class Untie:
    """Keeps one of several names of a tensor: undoes `Tie`, so that a tied tensor is written once.

    Names that are absent are not missed as long as one is there: a state may list a shared tensor once or under each
    name. Those that are there must be equal bit by bit, else nothing is made.
    """

    inputs: tuple[Pattern, ...] = attrs.field(converter=as_patterns)
    output: Pattern = attrs.field(converter=as_pattern)

    def __attrs_post_init__(self) -> None:
        _check(self.output, self.inputs)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        names = Names.of(names)
        groups = []
        for values in matches(self.inputs, names):
            inputs = [input_.fill(values) for input_ in self.inputs]
            present = [input_ for input_ in inputs if input_.name in names] or inputs[:1]
            leaf = Untie(present, self.output.fill(values))
            groups.append(Group([input_.name for input_ in present], [leaf.output.name], leaf))
        return groups

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        first = self.inputs[0]
        raise_all(
            [
                f"{other!r} is {specs[other.name]}, but {first!r}, to which it is tied, {specs[first.name]}"
                for other in self.inputs
                if specs[other.name] != specs[first.name]
            ]
        )
        return {self.output.name: specs[first.name]}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(input_.name) for input_ in self.inputs]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return self._one_of(parts)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: self._one_of([tensors[input_.name] for input_ in self.inputs])}

    def inverse(self) -> Tie:
        return Tie(self.output, self.inputs)

    def _one_of(self, tensors: Sequence[Tensor]) -> Tensor:
        raise_all(
            [
                f"{other!r} differs from {self.inputs[0]!r}, to which it is tied: export it under a name of its own"
                for other, tensor in zip(self.inputs, tensors)
                if not _same(tensor, tensors[0])
            ]
        )
        return tensors[0]


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Bit by bit, also where both are NaN."""
    if tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride():
        return True
    bits = _bits(tensor)
    return torch.equal(bits, _bits(other).to(bits.device))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of a single element
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
