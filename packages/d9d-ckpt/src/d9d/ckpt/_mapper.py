"""The protocol of the state graph's nodes, and the groups of names that they bind to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from ._names import natural_key
from ._spec import Region, TensorSpec


class Mapper(Protocol):
    """A transformation of named tensors, known before any of them is read.

    `bind` turns it into groups for the names at hand. The other methods see one group: they are called on the
    `mapper` of a group, with that group's tensors only.
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
        """The regions of inputs, at most one of an input, from which the non-empty region `want` can be made.

        None where that is not known without the whole group.
        """
        ...

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        """The group's outputs, from whole inputs. They may share memory with the inputs.

        With `want`, `tensors` hold the regions that `pull(want)` named, in its order, and the result is that region
        alone, under its name.
        """
        ...

    def inverse(self) -> Mapper:
        """The mapper that undoes this one.

        Raises:
            ValueError: There is none.
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
        """The regions of inputs, whose specs are `specs`, that `make` wants in order to make `want`."""
        pulled = self.mapper.pull(want)
        return [Region.whole(name, specs[name]) for name in self.inputs] if pulled is None else pulled

    def make(self, want: Region, tensors: Mapping[str, Tensor]) -> Tensor:
        """The region `want` of an output, from the regions that it `needs`.

        Raises:
            ValueError: The mapper returned another shape than it was asked for.
        """
        if self.mapper.pull(want) is None:
            made = self.mapper.apply(tensors)[want.name][want.slices]
        else:
            made = self.mapper.apply(tensors, want=want)[want.name]
        if made.shape != want.shape:
            raise ValueError(f"{self.mapper!r} made {list(made.shape)} of {want}")
        return made


def by_name(groups: Iterable[Group]) -> list[Group]:
    """The groups in natural order of their first output, or input where they have none."""
    return sorted(groups, key=lambda group: natural_key((*group.outputs, *group.inputs)[0]))
