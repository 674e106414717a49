"""What a mapper makes of a checkpoint, from headers alone, and what is wrong with it whatever the target is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ._collector import collector_paused
from ._mapper import Group, Mapper, bound, by_name
from ._mappers._chain import infer_known
from ._name_index import Names
from ._names import Pattern, natural_key, quote_with_nearest, require_list
from ._spec import TensorSpec


def trace(
    source: Mapping[str, TensorSpec], mapper: Mapper, *, waive: Collection[str] = ()
) -> tuple[list[Group], dict[str, TensorSpec | None], list[str]]:
    """What `mapper` makes of `source`, and the problems seen without knowing the target.

    Returns:
        The groups in natural order of their first output; the specs of what they make, None where a problem hides
        it; the problems.
    """
    require_list(waive)
    if mapper is None or isinstance(mapper, type):
        raise TypeError(f"a mapper is needed, such as Identity(), got {mapper!r}")
    with collector_paused():
        return _trace(dict(source), mapper, waive)


def _trace(
    specs: Mapping[str, TensorSpec], mapper: Mapper, waive: Collection[str]
) -> tuple[list[Group], dict[str, TensorSpec | None], list[str]]:
    groups = by_name(bound(mapper, Names.of(specs)))
    problems: list[str] = []
    outputs: dict[str, TensorSpec | None] = {}
    used: set[str] = set()
    for group in groups:
        problems += [
            f"made twice: {name!r}, the second time by {group.mapper!r}" for name in group.outputs if name in outputs
        ]
        made, found = infer_known(group, {name: specs[name] for name in group.inputs if name in specs})
        problems += found
        outputs |= {name: made.get(name) for name in group.outputs}
        used.update(group.inputs)
    unused = specs.keys() - used
    missing = quote_with_nearest(used - specs.keys(), unused)
    problems += [f"needed, but not in the source: {name}" for name in missing]
    unwaived = sorted(unused - _matching(unused, waive), key=natural_key)
    problems += [f"in the source, but neither used nor waived: {name!r}" for name in unwaived]
    return groups, outputs, problems


def _matching(names: Collection[str], patterns: Collection[str]) -> set[str]:
    """The names that a pattern matches; in one with `*`, that stands for anything, dots too, and nothing else does."""
    index = Names(names)
    found: set[str] = set()
    for text in patterns:
        if "*" in text:
            anything = re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)
            found.update(filter(anything.fullmatch, names))
            continue
        pattern = Pattern(text)
        found.update(name for name in index.candidates(pattern.parts) if pattern.match(name) is not None)
    return found
