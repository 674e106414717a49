"""The coverage proof: from headers alone, that a mapper makes exactly the tensors of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs

from d9d.ckpt._mapper import Group, Mapper
from d9d.ckpt._names import Pattern, natural_key, nearest
from d9d.ckpt._spec import TensorSpec


class PlanError(ValueError):
    """A mapper does not lead from a checkpoint to a model. `problems` has one line for each thing wrong."""

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
        source: What the checkpoint holds, such as an opened checkpoint. Nothing is read.
        mapper: From names of the checkpoint to names of the model.
        target: The whole model, also where only a part of it is loaded.
        select: Names of the target to make; by default all. Restricts the plan, not the proof.
        waive: Names or patterns of source tensors that may stay unused.

    Raises:
        PlanError: With all that is wrong.
    """
    groups, outputs, problems = trace(source, mapper, waive=waive)
    unmade, unknown = target.keys() - outputs.keys(), outputs.keys() - target.keys()
    problems += [
        f"made, but not in the model: {name!r}{nearest(name, unmade)}" for name in sorted(unknown, key=natural_key)
    ]
    problems += [
        f"in the model, but not made: {name!r}{nearest(name, unknown)}" for name in sorted(unmade, key=natural_key)
    ]
    problems += [
        f"made as {spec}, but the model has {target[name]}: {name!r}"
        for name, spec in outputs.items()
        if spec is not None and name in target and target[name] != spec
    ]
    selected = target.keys() if select is None else set(select)
    problems += [
        f"selected, but not in the model: {name!r}{nearest(name, target.keys())}"
        for name in sorted(selected - target.keys(), key=natural_key)
    ]
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
        groups = sorted(mapper.bind(source), key=lambda group: natural_key(group.outputs[0]))
    except ValueError as error:
        return [], {}, [str(error)]
    problems: list[str] = []
    unused = source.keys() - {name for group in groups for name in group.inputs}
    waived = [Pattern(text) for text in waive]
    outputs: dict[str, TensorSpec | None] = {}
    for group in groups:
        problems += [
            f"made twice: {name!r}, the second time by {group.mapper!r}" for name in group.outputs if name in outputs
        ]
        missing = [name for name in group.inputs if name not in source]
        problems += [
            f"not in the checkpoint: {name!r}{nearest(name, unused)}, for {group.outputs[0]!r}" for name in missing
        ]
        outputs |= dict.fromkeys(group.outputs)
        if not missing:
            try:
                outputs |= group.mapper.infer({name: source[name] for name in group.inputs})
            except ValueError as error:
                problems.append(str(error))
    problems += [
        f"in the checkpoint, but neither used nor waived: {name!r}"
        for name in sorted(unused, key=natural_key)
        if all(pattern.match(name) is None for pattern in waived)
    ]
    return groups, outputs, problems
