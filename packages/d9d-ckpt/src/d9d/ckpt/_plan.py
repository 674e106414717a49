"""The coverage proof: from headers alone, that a mapper makes exactly the tensors of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike

from ._collector import collector_paused
from ._mapper import Mapper
from ._names import quote_with_nearest, require_list
from ._planned import Plan
from ._problems import PlanError
from ._source import Source
from ._spec import Region, TensorSpec
from ._trace import trace


def plan(
    source: Mapping[str, TensorSpec],
    mapper: Mapper,
    target: Mapping[str, TensorSpec] | None = None,
    *,
    select: Collection[str | Region] | None = None,
    waive: Collection[str] = (),
) -> Plan:
    """Proves that `mapper` makes every tensor of `target` once, of the right shape and dtype, and uses all of `source`.

    Args:
        source: What there is, such as an opened checkpoint. Nothing is read.
        mapper: From names of the source to names of the target.
        target: What there shall be: the whole model, also where only a part of it is loaded. Without it, that
            the mapper fits and no tensor of the source is left out is all that is proven.
        select: Names of the target to make, or regions (a rank's parts of DTensors); by default all. Restricts the
            plan, not the proof. `Plan.select` does the same, without proving anew.
        waive: Names or patterns of source tensors that may stay unused; `optimizer.*` are all that begin so.

    Raises:
        PlanError: With all that is wrong.
        TypeError: A path in place of an opened checkpoint, tensors in place of specs, or one text in place of names.
    """
    if isinstance(source, (str, PathLike)):
        raise TypeError(f"a checkpoint is needed, got the path {str(source)!r}: give open_checkpoint({str(source)!r})")
    for name, spec in (target or {}).items():
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"the target has a {type(spec).__name__} for {name!r}: give TensorSpec.of(tensor)")
    require_list(select)
    with collector_paused():
        return _plan(source, mapper, target, select, waive)


def _plan(
    source: Mapping[str, TensorSpec],
    mapper: Mapper,
    target: Mapping[str, TensorSpec] | None,
    select: Collection[str | Region] | None,
    waive: Collection[str],
) -> Plan:
    groups, outputs, problems = trace(source, mapper, waive=waive)
    if target is None:
        target = {name: spec for name, spec in outputs.items() if spec is not None}
        unmade, unknown = set[str](), set[str]()
    else:
        unmade, unknown = target.keys() - outputs.keys(), outputs.keys() - target.keys()
    problems += [f"made, but not in the target: {name}" for name in quote_with_nearest(unknown, unmade)]
    problems += [f"in the target, but not made: {name}" for name in quote_with_nearest(unmade, unknown)]
    problems += [
        f"made as {spec}, but the target has {target[name]}: {name!r}{_advice(spec, target[name])}"
        for name, spec in outputs.items()
        if spec is not None and name in target and target[name] != spec
    ]
    whole = Plan.of(
        groups,
        {name: source[name] for group in groups for name in group.inputs if name in source},
        {name: target[name] for group in groups for name in group.outputs if name in target},
        file=source.file if isinstance(source, Source) else None,
    )
    if select is None:
        selected = whole
    else:
        try:
            names = select if isinstance(select, str) else [each for each in select if _name(each) not in unmade]
            selected = whole.select(names)
        except PlanError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems)
    return selected


def _advice(made: TensorSpec, wanted: TensorSpec) -> str:
    return " (a Cast changes the dtype)" if made.shape == wanted.shape else ""


def _name(each: str | Region) -> str:
    return each if isinstance(each, str) else each.name
