"""What a `Sequential` binds to: groups of several steps that depend on each other, run as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs
from torch import Tensor

from .._mapper import Group, Mapper
from .._names import natural_key
from .._spec import Region, TensorSpec

T = TypeVar("T")
Step = Sequence[Group]


def _run_step(
    step: Step, values: Mapping[str, T], call: Callable[[Mapper, Mapping[str, T]], Mapping[str, T]]
) -> dict[str, T]:
    """What the groups of one step make of `values`."""
    made: dict[str, T] = {}
    for group in step:
        made |= call(group.mapper, {name: values[name] for name in group.inputs})
    return made


def infer_step(step: Step, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Specs of what the groups of one step make."""
    return _run_step(step, specs, lambda mapper, inputs: mapper.infer(inputs))


def apply_step(step: Step, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the groups of one step make of whole tensors."""
    return _run_step(step, tensors, lambda mapper, inputs: mapper.apply(inputs))


def _steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    return tuple(map(tuple, steps))


@attrs.frozen(repr=False)
class Chain:
    """Bound groups in steps; each step takes from what is there and adds what it makes."""

    steps: tuple[Step, ...] = attrs.field(converter=_steps)

    @property
    def group(self) -> Group:
        """The chain as one group."""
        inputs: dict[str, None] = {}
        there: dict[str, None] = {}
        for step in self.steps:
            taken = dict.fromkeys(name for group in step for name in group.inputs)
            inputs |= {name: None for name in taken if name not in there}
            there = _advance(there, step, dict.fromkeys(name for group in step for name in group.outputs))
        return Group(sorted(inputs, key=natural_key), sorted(there, key=natural_key), self)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        del names  # bound already
        return [self.group]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        for step in self.steps:
            specs = _advance(specs, step, infer_step(step, specs))
        return specs

    def pull(self, want: Region) -> Sequence[Region] | None:
        regions = self._pull(want, len(self.steps))
        if regions is None:
            return None
        distinct = dict.fromkeys(regions)
        names = {region.name for region in distinct}
        return list(distinct) if len(distinct) == len(names) else None

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        if want is not None:
            return {want.name: self._make(want, len(self.steps), tensors)}
        for step in self.steps:
            tensors = _advance(tensors, step, apply_step(step, tensors))
        return tensors

    def inverse(self) -> Chain:
        return Chain(
            [undone for group in step for undone in group.mapper.inverse().bind(group.outputs)]
            for step in reversed(self.steps)
        )

    def __repr__(self) -> str:
        group = self.group
        return f"Chain({len(group.inputs)} inputs from {group.inputs[0]!r} to {', '.join(map(repr, group.outputs))})"

    @functools.cached_property
    def _makers(self) -> tuple[Mapping[str, Mapper], ...]:
        return tuple({name: group.mapper for group in step for name in group.outputs} for step in self.steps)

    def _pull(self, want: Region, after: int) -> list[Region] | None:
        """The inputs' regions that make `want` as it is after the first `after` steps."""
        if after == 0:
            return [want]
        maker = self._makers[after - 1].get(want.name)
        parts = [want] if maker is None else maker.pull(want)
        if parts is None:
            return None
        regions: list[Region] = []
        for part in parts:
            pulled = self._pull(part, after - 1)
            if pulled is None:
                return None
            regions += pulled
        return regions

    def _make(self, want: Region, after: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """`want` as it is after the first `after` steps."""
        if after == 0:
            return tensors[want.name]
        maker = self._makers[after - 1].get(want.name)
        if maker is None:
            return self._make(want, after - 1, tensors)
        parts = {part.name: self._make(part, after - 1, tensors) for part in maker.pull(want) or ()}
        return maker.apply(parts, want=want)[want.name]


def _advance(there: Mapping[str, T], step: Step, made: Mapping[str, T]) -> dict[str, T]:
    taken = {name for group in step for name in group.inputs}
    return {**{name: value for name, value in there.items() if name not in taken}, **made}


def connected(steps: Sequence[Step]) -> list[Chain]:
    """Splits steps into the smallest chains that do not depend on each other."""
    nodes: list[tuple[int, Group]] = []
    parent: list[int] = []  # following it from any node of a chain ends in the same one
    maker: Mapping[str, int] = {}  # the node that made a name that is there

    def root(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for number, step in enumerate(steps):
        made: dict[str, int] = {}
        for group in step:
            node = len(nodes)
            nodes.append((number, group))
            parent.append(node)
            for name in group.inputs:
                if name in maker:
                    parent[root(maker[name])] = node
            made |= dict.fromkeys(group.outputs, node)
        maker = _advance(maker, step, made)

    chains: dict[int, dict[int, list[Group]]] = {}
    for node, (number, group) in enumerate(nodes):
        chains.setdefault(root(node), {}).setdefault(number, []).append(group)
    return [Chain(chain.values()) for chain in chains.values()]
