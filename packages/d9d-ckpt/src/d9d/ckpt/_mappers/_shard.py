"""A share of what a mapper does, for several processes that convert a checkpoint without talking to each other."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import attrs
from torch import Tensor

from .._mapper import Fault, Group, Mapper
from .._names import Pattern
from .._spec import TensorSpec
from ._chain import apply_step, infer_step
from ._constant import Drop


@attrs.frozen
class Shard(Mapper):
    """The `index`-th of `count` shares of a mapper's groups, balanced by their numbers of tensors.

    Each group is in one share, the same in every process. What the other shares take is dropped unread, so that each
    process proves the whole checkpoint to be used. To load a part of a model, `select` is the better way.
    """

    mapper: Mapper
    index: int = attrs.field(kw_only=True, validator=attrs.validators.ge(0))
    """Which share, from 0."""
    count: int = attrs.field(kw_only=True, validator=attrs.validators.ge(1))
    """How many shares there are."""

    def __attrs_post_init__(self) -> None:
        if self.index >= self.count:
            raise ValueError(f"the index of one of {self.count} shares is less than that, got {self.index}")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        groups = self.mapper.bind(names)
        heaviest_first = sorted(groups, key=lambda group: -len(group.inputs) - len(group.outputs))
        loads = [(0, share) for share in range(self.count)]
        shares: list[list[Group]] = [[] for _ in loads]
        for group in heaviest_first:
            load, share = heapq.heappop(loads)
            shares[share].append(group)
            heapq.heappush(loads, (load + len(group.inputs) + len(group.outputs), share))
        mine = set(map(id, shares[self.index]))
        bound: list[Group] = []
        for group in groups:
            if id(group) in mine or isinstance(group.mapper, Fault):
                bound.append(group)
            else:
                bound += [Group([name], [], Drop(Pattern.literal(name))) for name in group.inputs]
        return bound

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return infer_step(self.bind(specs), specs)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return apply_step(self.bind(tensors), tensors)

    def inverse(self) -> Mapper:
        raise ValueError(
            f"{self!r} has no inverse: it does not keep the other shares; take a Shard of the mapper's inverse"
        )
