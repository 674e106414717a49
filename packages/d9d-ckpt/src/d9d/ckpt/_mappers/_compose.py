"""Composites: mappers side by side, one after the other, and under a prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import attrs
from torch import Tensor

from .._mapper import Group, Mapper, by_name
from .._names import natural_key
from .._spec import Region, TensorSpec
from ._chain import apply_step, connected, infer_step

T = TypeVar("T")


@attrs.frozen(init=False, repr=False)
class Parallel:
    """Mappers side by side: each takes its own of the names; what none takes is left."""

    mappers: tuple[Mapper, ...]

    def __init__(self, *mappers: Mapper) -> None:
        object.__setattr__(self, "mappers", mappers)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return by_name(group for mapper in self.mappers for group in mapper.bind(names))

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return infer_step(self.bind(specs), specs)

    def pull(self, want: Region) -> Sequence[Region] | None:
        del want  # its groups carry the mappers that know
        return None

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        del want
        return apply_step(self.bind(tensors), tensors)

    def inverse(self) -> Parallel:
        return Parallel(*(mapper.inverse() for mapper in self.mappers))

    def __repr__(self) -> str:
        return f"Parallel({', '.join(map(repr, self.mappers))})"


@attrs.frozen(init=False, repr=False)
class Sequential:
    """Mappers one after the other.

    Each sees the names that are there: those given, less what earlier ones took, plus what they made. What is made
    and not taken is an output.
    """

    mappers: tuple[Mapper, ...]

    def __init__(self, *mappers: Mapper) -> None:
        object.__setattr__(self, "mappers", mappers)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        """As in the protocol.

        Raises:
            ValueError: A mapper makes a name that is still there, or takes one that is gone.
        """
        there, gone = set(names), set[str]()
        steps: list[Sequence[Group]] = []
        for mapper in self.mappers:
            groups = mapper.bind(sorted(there, key=natural_key))
            taken = {name for group in groups for name in group.inputs}
            made = Counter(name for group in groups for name in group.outputs)
            left = there - taken
            if used := sorted(taken & (gone - there)):
                raise ValueError(f"{mapper!r} takes {used!r}, which an earlier mapper took")
            if clash := sorted(name for name, times in made.items() if times > 1 or name in left):
                raise ValueError(f"{mapper!r} makes {clash!r}, which exist already")
            there, gone = left | made.keys(), gone | taken
            steps.append(groups)
        return by_name(chain.group for chain in connected(steps))

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return infer_step(self.bind(specs), specs)

    def pull(self, want: Region) -> Sequence[Region] | None:
        del want  # its groups carry the mappers that know
        return None

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        del want
        return apply_step(self.bind(tensors), tensors)

    def inverse(self) -> Sequential:
        return Sequential(*(mapper.inverse() for mapper in reversed(self.mappers)))

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.mappers))})"


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
        return [
            Group(
                [self.input + name for name in group.inputs],
                [self.output + name for name in group.outputs],
                attrs.evolve(self, mapper=group.mapper),
            )
            for group in self.mapper.bind([n.removeprefix(self.input) for n in names if n.startswith(self.input)])
        ]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return self._leave(self.mapper.infer(self._enter(specs)))

    def pull(self, want: Region) -> Sequence[Region] | None:
        pulled = self.mapper.pull(self._inner(want))
        return None if pulled is None else [region.renamed(self.input + region.name) for region in pulled]

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        return self._leave(self.mapper.apply(self._enter(tensors), want=None if want is None else self._inner(want)))

    def inverse(self) -> Prefix:
        return Prefix(self.output, self.mapper.inverse(), output=self.input)

    def _enter(self, values: Mapping[str, T]) -> Mapping[str, T]:
        return {name.removeprefix(self.input): value for name, value in values.items()}

    def _leave(self, values: Mapping[str, T]) -> Mapping[str, T]:
        return {self.output + name: value for name, value in values.items()}

    def _inner(self, want: Region) -> Region:
        return want.renamed(want.name.removeprefix(self.output))
