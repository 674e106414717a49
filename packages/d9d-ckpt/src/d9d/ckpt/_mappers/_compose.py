"""Composites: mappers side by side, and one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
from torch import Tensor

from .._mapper import Fault, Group, Mapper, bound
from .._name_index import Names
from .._problems import for_all
from .._spec import TensorSpec
from ._chain import apply_step, connected, infer_step


@attrs.frozen(init=False, repr=False)
class Parallel(Mapper):
    """Mappers side by side: each takes its own of the names; what none takes is left."""

    mappers: tuple[Mapper, ...]

    def __init__(self, *mappers: Mapper) -> None:
        object.__setattr__(self, "mappers", mappers)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        names = Names.of(names)
        return [group for mapper in self.mappers for group in bound(mapper, names)]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return infer_step(self.bind(specs), specs)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return apply_step(self.bind(tensors), tensors)

    def inverse(self) -> Parallel:
        return Parallel(*for_all(self.mappers, lambda mapper: mapper.inverse()))

    def __repr__(self) -> str:
        return f"Parallel({', '.join(map(repr, self.mappers))})"


@attrs.frozen(init=False, repr=False)
class Sequential(Mapper):
    """Mappers one after the other.

    Each sees the names that are there: those given, less what earlier ones took, plus what they made. What is made
    and not taken is an output. Where a mapper makes a name that is still there, or takes one that is gone, the group
    has a problem, which planning tells.
    """

    mappers: tuple[Mapper, ...]

    def __init__(self, *mappers: Mapper) -> None:
        object.__setattr__(self, "mappers", mappers)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        there, gone = Names.over(Names.of(names)), set[str]()
        steps: list[Sequence[Group]] = []
        for mapper in self.mappers:
            step = _checked(mapper, bound(mapper, there), there, gone)
            taken = [name for group in step for name in group.inputs]
            there.update(remove=taken, add=[name for group in step for name in group.outputs])
            gone.update(taken)
            steps.append(step)
        return connected(steps)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return infer_step(self.bind(specs), specs)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return apply_step(self.bind(tensors), tensors)

    def inverse(self) -> Sequential:
        return Sequential(*for_all(reversed(self.mappers), lambda mapper: mapper.inverse()))

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.mappers))})"


def _checked(mapper: Mapper, groups: Sequence[Group], there: Names, gone: set[str]) -> list[Group]:
    """The groups of a step, those that cannot follow the steps before replaced by faults."""
    taken = {name for group in groups for name in group.inputs}
    outputs = [name for group in groups for name in group.outputs]
    made = set(outputs)
    if len(made) == len(outputs) and gone.isdisjoint(taken) and not any(n in there for n in made - taken):
        return list(groups)
    made.clear()
    checked = []
    for group in groups:
        used = [name for name in group.inputs if name in gone and name not in there]
        twice = [name for name in group.outputs if name in made]
        left = [name for name in group.outputs if name in there and name not in taken]
        made.update(group.outputs)
        if not (used or twice or left):
            checked.append(group)
            continue
        problems = [f"takes {used!r}, which an earlier mapper took"] if used else []
        problems += [f"makes {sorted((*twice, *left))!r}, which exist already"] if twice or left else []
        # it takes what is left, so that nothing else is said of the same names
        inputs = [*(name for name in group.inputs if name not in used), *left]
        checked.append(
            Group(
                inputs,
                [name for name in group.outputs if name not in twice],
                Fault(f"{mapper!r} {' and '.join(problems)}"),
            )
        )
    return checked
