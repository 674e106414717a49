"""The protocol of the state graph's nodes, and the groups of names that they bind to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from ._names import natural_key
from ._problems import problems_of
from ._spec import Region, TensorSpec


class Mapper(Protocol):
    """A transformation of named tensors, known before any of them is read.

    `bind` turns it into groups for the names at hand. The other methods see one group: they are called on the
    `mapper` of a group, with that group's tensors only.

    A leaf of your own may inherit from this class or not. If it does, `pull` and `assemble` are given: it takes its
    inputs whole.
    """

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        """The groups that this mapper makes of `names`, in an order that depends on the names alone.

        Names that it does not take are left to others. A group may list inputs that are not among `names`: whoever
        plans reports them as missing.
        """
        ...

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Specs of the group's outputs from those of its inputs.

        Raises:
            ValueError: The inputs cannot be mapped.
        """
        ...

    def pull(self, want: Region) -> Sequence[Region] | None:
        """The regions of inputs from which the non-empty region `want` of an output is made, in an order of its own.

        None where that is not known without the whole group.
        """
        del want
        return None

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        """`want`, from the regions that `pull(want)` named, in that order. It may share memory with them.

        Not called where `pull` returns None.
        """
        del parts
        raise TypeError(f"{self!r} cannot make {want} of slices")

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The group's outputs, from whole inputs. They may share memory with the inputs."""
        ...

    def inverse(self) -> Mapper:
        """The mapper that undoes this one.

        Raises:
            ValueError: There is none; the message has the mapper's repr.
        """
        ...


def _names(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@attrs.frozen
class Group:
    """The smallest set of tensors that are transformed together."""

    inputs: tuple[str, ...] = attrs.field(converter=_names)
    outputs: tuple[str, ...] = attrs.field(converter=_names)
    mapper: Mapper
    """What transforms exactly this group: a leaf with plain names, or a composite of such."""

    def needs(self, want: Region, specs: Mapping[str, TensorSpec]) -> Sequence[Region]:
        """The different regions of inputs, whose specs are `specs`, that `make` wants in order to make `want`.

        Several of them may be of one input, where a chain of mappers takes it apart and puts it together otherwise.
        """
        pulled = self.mapper.pull(want)
        if pulled is None:
            return [Region.whole(name, specs[name]) for name in self.inputs]
        return list(dict.fromkeys(pulled))

    def make(self, want: Region, tensors: Mapping[Region, Tensor]) -> Tensor:
        """The region `want` of an output, from the regions that it `needs`.

        Raises:
            ValueError: The mapper returned another shape than it was asked for.
        """
        pulled = self.mapper.pull(want)
        if pulled is None:
            whole = {region.name: tensor for region, tensor in tensors.items()}
            made = self.mapper.apply({name: whole[name] for name in self.inputs})[want.name][want.slices]
        else:
            made = self.mapper.assemble(want, [tensors[region] for region in pulled])
        if made.shape != want.shape:
            raise ValueError(f"{self.mapper!r} made {list(made.shape)} of {want}")
        return made


@attrs.frozen
class Fault:
    """Takes the place of a mapper that cannot be bound, so that what is wrong with others is seen too."""

    problem: str

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        del names
        return [Group((), (), self)]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        del specs
        raise ValueError(self.problem)

    def pull(self, want: Region) -> Sequence[Region] | None:
        del want
        raise ValueError(self.problem)

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        del want, parts
        raise ValueError(self.problem)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        del tensors
        raise ValueError(self.problem)

    def inverse(self) -> Mapper:
        raise ValueError(self.problem)


def bound(mapper: Mapper, names: Collection[str]) -> Sequence[Group]:
    """The groups of `mapper`; where it cannot be bound, one that says why."""
    try:
        return mapper.bind(names)
    except ValueError as error:
        return [Group((), (), Fault(problem)) for problem in problems_of(error)]


def by_name(groups: Iterable[Group]) -> list[Group]:
    """The groups in natural order of their first output, or input where they have none."""
    return sorted(groups, key=lambda group: natural_key(next(iter((*group.outputs, *group.inputs)), "")))
