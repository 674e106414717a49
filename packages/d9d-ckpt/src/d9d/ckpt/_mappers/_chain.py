"""What a `Sequential` binds to: groups of several steps that depend on each other, run as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs
from torch import Tensor

from d9d.ckpt._mapper import Group, Mapper
from d9d.ckpt._names import natural_key
from d9d.ckpt._spec import Region, TensorSpec

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


@attrs.frozen
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
        needed: dict[str, Region] = {}
        for region in self._pull(want, len(self.steps)) or ():
            if needed.setdefault(region.name, region) != region:
                return None  # two regions of one input
        return list(needed.values()) or None

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
