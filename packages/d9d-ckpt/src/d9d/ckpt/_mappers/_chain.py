"""What a `Sequential` binds to: groups of several steps that depend on each other, run as one."""

from __future__ import annotations

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
        levels = self._levels(want)
        return None if levels is None else list(levels[0].values())

    def apply(self, tensors: Mapping[str, Tensor], *, want: Region | None = None) -> Mapping[str, Tensor]:
        if want is None:
            for step in self.steps:
                tensors = _advance(tensors, step, apply_step(step, tensors))
            return tensors
        levels = self._levels(want)
        if levels is None:
            raise ValueError(f"{want} cannot be made from slices")
        for step, wants in zip(self.steps, levels[1:]):
            maker = _makers(step)
            made: dict[str, Tensor] = {}
            for region in wants.values():
                if region.name in maker:
                    mapper = maker[region.name].mapper
                    parts = {part.name: tensors[part.name] for part in mapper.pull(region) or ()}
                    made |= mapper.apply(parts, want=region)
                else:
                    made[region.name] = tensors[region.name]
            tensors = made
        return tensors

    def inverse(self) -> Chain:
        return Chain(
            [undone for group in step for undone in group.mapper.inverse().bind(group.outputs)]
            for step in reversed(self.steps)
        )

    def _levels(self, want: Region) -> list[dict[str, Region]] | None:
        """The regions needed before the first step, after it, and so on to `want` alone; None if two of one tensor."""
        levels = [{want.name: want}]
        for step in reversed(self.steps):
            maker = _makers(step)
            needed: dict[str, Region] = {}
            for region in levels[0].values():
                pulled = maker[region.name].mapper.pull(region) if region.name in maker else [region]
                if pulled is None:
                    return None
                for part in pulled:
                    if needed.setdefault(part.name, part) != part:
                        return None
            levels.insert(0, needed)
        return levels


def _makers(step: Step) -> dict[str, Group]:
    return {name: group for group in step for name in group.outputs}


def _advance(there: Mapping[str, T], step: Step, made: Mapping[str, T]) -> dict[str, T]:
    taken = {name for group in step for name in group.inputs}
    return {**{name: value for name, value in there.items() if name not in taken}, **made}
