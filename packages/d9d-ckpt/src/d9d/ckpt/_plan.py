"""The coverage proof: from headers alone, that a mapper makes exactly the tensors of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs

from ._mapper import Group, Mapper, by_name
from ._names import Pattern, natural_key, quote_with_nearest
from ._spec import TensorSpec


class PlanError(ValueError):
    """A mapper does not lead from the source to the target. `problems` has one line for each thing wrong."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"the plan has {len(self.problems)} problem(s):", *self.problems]))


@attrs.frozen
class Plan:
    """What to read and make, in the order in which it is streamed."""

    groups: tuple[Group, ...]
    """In natural order of their first output."""
    outputs: Mapping[str, TensorSpec]
    """Everything that the groups make."""

    def __str__(self) -> str:
        lines = (f"{name} {spec}" for name, spec in self.outputs.items())
        return "\n  ".join([f"{len(self.groups)} groups make {len(self.outputs)} tensors:", *lines])


def plan(
    source: Mapping[str, TensorSpec],
    mapper: Mapper,
    target: Mapping[str, TensorSpec],
    *,
    select: Collection[str] | None = None,
    waive: Collection[str] = (),
) -> Plan:
    """Proves that `mapper` makes every tensor of `target` once, of the right shape and dtype, and uses all of `source`.

    Args:
        source: What there is, such as an opened checkpoint. Nothing is read.
        mapper: From names of the source to names of the target.
        target: What there shall be: the whole model, also where only a part of it is loaded.
        select: Names of the target to make; by default all. Restricts the plan, not the proof.
        waive: Names or patterns of source tensors that may stay unused.

    Raises:
        PlanError: With all that is wrong.
    """
    groups, outputs, problems = trace(source, mapper, waive=waive)
    unmade, unknown = target.keys() - outputs.keys(), outputs.keys() - target.keys()
    problems += [f"made, but not in the target: {name}" for name in quote_with_nearest(unknown, unmade)]
    problems += [f"in the target, but not made: {name}" for name in quote_with_nearest(unmade, unknown)]
    problems += [
        f"made as {spec}, but the target has {target[name]}: {name!r}"
        for name, spec in outputs.items()
        if spec is not None and name in target and target[name] != spec
    ]
    selected = target.keys() if select is None else set(select)
    unselectable = quote_with_nearest(selected - target.keys(), target.keys())
    problems += [f"selected, but not in the target: {name}" for name in unselectable]
    if problems:
        raise PlanError(problems)
    chosen = tuple(group for group in groups if not selected.isdisjoint(group.outputs))
    return Plan(chosen, {name: target[name] for group in chosen for name in group.outputs})


def trace(
    source: Mapping[str, TensorSpec], mapper: Mapper, *, waive: Collection[str] = ()
) -> tuple[list[Group], dict[str, TensorSpec | None], list[str]]:
    """What `mapper` makes of `source`, and the problems seen without knowing the target.

    Returns:
        The groups in natural order of their first output; the specs of what they make, None where a problem hides
        it; the problems.
    """
    try:
        groups = by_name(mapper.bind(source))
    except ValueError as error:
        return [], {}, [str(error)]
    problems: list[str] = []
    outputs: dict[str, TensorSpec | None] = {}
    for group in groups:
        problems += [
            f"made twice: {name!r}, the second time by {group.mapper!r}" for name in group.outputs if name in outputs
        ]
        outputs |= dict.fromkeys(group.outputs)
        if source.keys() >= set(group.inputs):
            try:
                outputs |= group.mapper.infer({name: source[name] for name in group.inputs})
            except ValueError as error:
                problems.append(str(error))
    used = {name for group in groups for name in group.inputs}
    unused = source.keys() - used
    waived = [Pattern(text) for text in waive]
    problems += [f"needed, but not in the source: {name}" for name in quote_with_nearest(used - source.keys(), unused)]
    problems += [
        f"in the source, but neither used nor waived: {name!r}"
        for name in sorted(unused, key=natural_key)
        if all(pattern.match(name) is None for pattern in waived)
    ]
    return groups, outputs, problems
