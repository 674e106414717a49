"""Leaves that pass a tensor on as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
from torch import Tensor

from .._mapper import Group
from .._name_index import Names
from .._names import Pattern, as_pattern, as_patterns, matches, require_same_fields
from .._spec import Region, TensorSpec
from ._one import bind_one


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
        return bind_one(self, names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return {self.output.name: specs[self.input.name]}

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want.renamed(self.input.name)]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0]

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: tensors[self.input.name]}

    def inverse(self) -> Rename:
        return Rename(self.output, self.input)


@attrs.frozen(init=False, repr=False)
class Identity:
    """Passes tensors on as they are: those that one of `patterns` matches, all when there is none."""

    patterns: tuple[Pattern, ...]

    def __init__(self, *patterns: str | Pattern) -> None:
        object.__setattr__(self, "patterns", as_patterns(patterns))

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        if not self.patterns:
            return [Group([name], [name], self) for name in Names.of(names)]
        taken = dict.fromkeys(
            pattern.fill(values).name for pattern in self.patterns for values in matches([pattern], names)
        )
        return [Group([name], [name], self) for name in taken]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return specs

    def pull(self, want: Region) -> Sequence[Region] | None:
        return [want]

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want
        return parts[0]

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def inverse(self) -> Identity:
        return self

    def __repr__(self) -> str:
        return f"Identity({', '.join(map(repr, self.patterns))})"
