"""What a `Sequential` binds to: groups of several steps that depend on each other, run as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs
from torch import Tensor

from .._mapper import Fault, Group
from .._problems import for_all, problems_of, raise_all
from .._spec import Region, TensorSpec

T = TypeVar("T")
Step = Sequence[Group]


def apply_step(step: Step, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the groups of one step make of whole tensors."""
    made: dict[str, Tensor] = {}
    for group in step:
        made |= group.mapper.apply({name: tensors[name] for name in group.inputs})
    return made


def infer_step(step: Step, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Specs of what the groups of one step make.

    Raises:
        ValueError: They cannot be mapped; all problems are told.
    """
    made: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for group in step:
        known, found = infer_known(group, specs)
        made |= known
        problems += found
    raise_all(problems)
    return made


def infer_known(group: Group, specs: Mapping[str, TensorSpec]) -> tuple[Mapping[str, TensorSpec], Sequence[str]]:
    """What can be told of a group when `specs` lack some of its inputs: specs of outputs, and problems."""
    known = {name: specs[name] for name in group.inputs if name in specs}
    match group.mapper:
        case Chain(steps):
            problems: list[str] = []

            def infer(step_group: Group, values: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
                made, found = infer_known(step_group, values)
                problems.extend(found)
                return made

            return run(steps, known, infer), problems
        case Fault(problem):
            return {}, [problem]
    if len(known) < len(set(group.inputs)):
        return {}, []
    try:
        made = group.mapper.infer(known)
    except ValueError as error:
        return {}, problems_of(error)
    if made.keys() != set(group.outputs):
        return {}, [f"{group.mapper!r} is bound to make {list(group.outputs)}, but infers {list(made)}"]
    return made, []


def run(
    steps: Iterable[Step], values: Mapping[str, T], call: Callable[[Group, Mapping[str, T]], Mapping[str, T]]
) -> dict[str, T]:
    """What is there after all steps: each takes its groups' inputs from what is there, and adds what they make."""
    there = dict(values)
    for step in steps:
        made: dict[str, T] = {}
        for group in step:
            made |= call(group, there)
        for group in step:
            for name in group.inputs:
                there.pop(name, None)
        there |= made
    return there


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
            inputs |= {name: None for group in step for name in group.inputs if name not in there}
            there = run([step], there, lambda group, _: dict.fromkeys(group.outputs))
        return Group(inputs, there, self)

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        del names  # bound already
        return [self.group]

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        made, problems = infer_known(self.group, specs)
        raise_all(problems)
        return made

    def pull(self, want: Region) -> Sequence[Region] | None:
        return self._pull(want, len(self.steps))

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        pulled = self.pull(want)
        assert pulled is not None, "else there are no parts"
        return self._make(want, len(self.steps), dict(zip(pulled, parts)))

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return run(
            self.steps,
            tensors,
            lambda group, there: group.mapper.apply({name: there[name] for name in group.inputs}),
        )

    def inverse(self) -> Chain:
        return Chain(
            [
                undone
                for groups in for_all(step, lambda group: group.mapper.inverse().bind(group.outputs))
                for undone in groups
            ]
            for step in reversed(self.steps)
        )

    def __repr__(self) -> str:
        group = self.group
        return f"Chain({len(group.inputs)} inputs to {', '.join(map(repr, group.outputs))})"

    def maker(self, name: str, after: int) -> tuple[int, Group] | None:
        """The step, and the group in it, that made what `name` is after the first `after` steps; None for inputs."""
        for number in reversed(range(after)):
            if name in self._makers[number]:
                return number, self._makers[number][name]
        return None

    @functools.cached_property
    def _makers(self) -> tuple[Mapping[str, Group], ...]:
        return tuple({name: group for group in step for name in group.outputs} for step in self.steps)

    def _pull(self, want: Region, after: int) -> list[Region] | None:
        """The inputs' regions that make `want` as it is after the first `after` steps."""
        found = self.maker(want.name, after)
        if found is None:
            return [want]
        number, group = found
        parts = group.mapper.pull(want)
        if parts is None:
            return None
        regions: list[Region] = []
        for part in parts:
            pulled = self._pull(part, number)
            if pulled is None:
                return None
            regions += pulled
        return regions

    def _make(self, want: Region, after: int, tensors: Mapping[Region, Tensor]) -> Tensor:
        """`want` as it is after the first `after` steps."""
        found = self.maker(want.name, after)
        if found is None:
            return tensors[want]
        number, group = found
        parts = [self._make(part, number, tensors) for part in group.mapper.pull(want) or ()]
        return group.mapper.assemble(want, parts)


def connected(steps: Sequence[Step]) -> list[Group]:
    """Splits steps into the smallest groups that do not depend on each other."""
    nodes: list[tuple[int, Group]] = []
    parent: list[int] = []  # following it from any node of a chain ends in the same one
    maker: dict[str, int] = {}  # the node that made a name that is there

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
        for group in step:
            for name in group.inputs:
                maker.pop(name, None)
        maker |= made

    chains: dict[int, dict[int, list[Group]]] = {}
    for node, (number, group) in enumerate(nodes):
        chains.setdefault(root(node), {}).setdefault(number, []).append(group)
    return [_as_group(list(chain.values())) for chain in chains.values()]


def _as_group(steps: Sequence[Step]) -> Group:
    return steps[0][0] if len(steps) == len(steps[0]) == 1 else Chain(steps).group
