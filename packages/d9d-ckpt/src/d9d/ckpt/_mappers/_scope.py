"""Mappers for the names under a prefix, which they do not see: once, for a child of a model, or for each layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import attrs
from torch import Tensor

from .._mapper import Fault, Group, Mapper, bound
from .._name_index import Names
from .._names import Pattern, as_pattern, require_same_fields
from .._problems import problems_of, raise_all
from .._spec import Region, TensorSpec
from ._chain import Chain, apply_step, infer_step
from ._rename import Identity, Rename

T = TypeVar("T")


@attrs.frozen
class Prefix:
    """A mapper for the names under a prefix, which it does not see.

    `Prefix("model.layers.3.", layer)`; with `output` the prefix changes on the way.
    """

    input: str
    mapper: Mapper
    output: str = attrs.field(kw_only=True, default=attrs.Factory(lambda self: self.input, takes_self=True))
    """Prefix of what is made; by default that of what is taken."""

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        groups = bound(self.mapper, Names.of(names).scope(self.input))
        return [_scoped(group, self.input, self.output) for group in groups]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        try:
            return self._leave(self.mapper.infer(self._enter(specs)))
        except ValueError as error:
            raise_all([f"under {self.input!r}: {problem}" for problem in problems_of(error)])
            raise

    def pull(self, want: Region) -> Sequence[Region] | None:
        pulled = self.mapper.pull(self._inner(want))
        return None if pulled is None else [region.renamed(self.input + region.name) for region in pulled]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        return self.mapper.assemble(self._inner(want), parts)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._leave(self.mapper.apply(self._enter(tensors)))

    def inverse(self) -> Prefix:
        return Prefix(self.output, self.mapper.inverse(), output=self.input)

    def _enter(self, values: Mapping[str, T]) -> Mapping[str, T]:
        return {name.removeprefix(self.input): value for name, value in values.items()}

    def _leave(self, values: Mapping[str, T]) -> Mapping[str, T]:
        return {self.output + name: value for name, value in values.items()}

    def _inner(self, want: Region) -> Region:
        return want.renamed(want.name.removeprefix(self.output))


def _scoped(group: Group, input_: str, output: str) -> Group:
    """The group with prefixes before its names."""
    inputs, outputs = [input_ + name for name in group.inputs], [output + name for name in group.outputs]
    match group.mapper:
        case Fault(problem):
            return Group(inputs, outputs, Fault(f"under {input_!r}: {problem}"))
        case Chain(steps):
            # what a chain makes on its way is within the first prefix, so that no two names become one
            inner = [[_scoped(each, input_, input_) for each in step] for step in steps]
            if input_ != output:
                inner.append([_moved(input_ + name, output + name) for name in group.outputs])
            return Group(inputs, outputs, Chain(inner))
        case Prefix(input=inner_input, mapper=mapper, output=inner_output):
            return Group(inputs, outputs, Prefix(input_ + inner_input, mapper, output=output + inner_output))
        case mapper:
            return Group(inputs, outputs, Prefix(input_, mapper, output=output))


def _moved(old: str, new: str) -> Group:
    return Group([old], [new], Rename(Pattern.literal(old), Pattern.literal(new)))


@attrs.frozen
class SelectChild:
    """Passes on the names under a prefix without it: the checkpoint of a model's child out of that of the model.

    Other names are left. The inverse puts the prefix before all names.
    """

    prefix: str

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return self._mapper().bind(names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return self._mapper().infer(specs)

    def pull(self, want: Region) -> Sequence[Region] | None:
        return self._mapper().pull(want)

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        return self._mapper().assemble(want, parts)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._mapper().apply(tensors)

    def inverse(self) -> Prefix:
        return self._mapper().inverse()

    def _mapper(self) -> Prefix:
        return Prefix(self.prefix, Identity(), output="")


@attrs.frozen
class Repeat(Mapper):
    """A mapper under each prefix of a kind: `Repeat("model.layers.{layer}.", layer_mapper, output="layers.{layer}.")`.

    Without `count` there is one for each prefix that the names have; then a checkpoint that lacks a layer is found
    out by comparing with the target only.
    """

    input: Pattern = attrs.field(converter=as_pattern)
    mapper: Mapper
    output: Pattern = attrs.field(
        kw_only=True, converter=as_pattern, default=attrs.Factory(lambda self: self.input, takes_self=True)
    )
    """Prefix of what is made; by default that of what is taken."""
    count: int | None = attrs.field(
        default=None, kw_only=True, validator=attrs.validators.optional(attrs.validators.ge(0))
    )
    """The one field of the prefix runs from 0 to `count - 1`."""

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)
        if not self.input.fields or not self.input.text.endswith("."):
            raise ValueError(f"a repeated prefix has a field and ends in a dot, got {self.input!r}")
        if self.count is not None and len(self.input.fields) != 1:
            raise ValueError(f"a count needs a prefix with one field, got {self.input!r}")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        names = Names.of(names)
        groups: list[Group] = []
        for values in self._values(names):
            input_, output = self.input.fill(values).name, self.output.fill(values).name
            groups += Prefix(input_, self.mapper, output=output).bind(names)
        return groups

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return infer_step(self.bind(specs), specs)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return apply_step(self.bind(tensors), tensors)

    def inverse(self) -> Repeat:
        return Repeat(self.output, self.mapper.inverse(), output=self.input, count=self.count)

    def _values(self, names: Names) -> Sequence[Mapping[str, str]]:
        if self.count is not None:
            (field,) = self.input.fields
            return [{field: str(number)} for number in range(self.count)]
        found = map(self.input.match, names.prefixes(self.input.parts[:-1]))
        return [values for values in found if values is not None]
