"""Where one tensor comes from, as a tree that people read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from ._collapse import skeleton
from ._describe import describe
from ._describe_bytes import describe_bytes
from ._mapper import Group
from ._mappers._chain import Chain, infer_step, run
from ._spec import Region, TensorSpec

_ALIKE = 6
"""Inputs in a row that differ in numbers alone, of which all are shown."""


@attrs.frozen
class _Origin:
    """A region, and what it is made of."""

    region: Region
    spec: TensorSpec
    by: str | None
    """None for what is read."""
    inputs: Sequence[_Origin] = ()

    @property
    def kind(self) -> object:
        return skeleton(self.region.name), self.by, len(self.inputs)


def explain(group: Group, want: Region, specs: Mapping[str, TensorSpec], files: Mapping[str, str]) -> str:
    """The tree of what `want` is made of, down to bytes of files."""
    origin = _trace_back(group, want, specs, lambda region: _Origin(region, specs[region.name], None))
    return "\n".join(_lines(origin, "", "", files))


def _trace_back(
    group: Group, want: Region, specs: Mapping[str, TensorSpec], source: Callable[[Region], _Origin]
) -> _Origin:
    """The origin of a region that `group` makes of inputs with these `specs`, of which `source` tells the origins."""
    if not isinstance(group.mapper, Chain):
        spec = group.mapper.infer({name: specs[name] for name in group.inputs})[want.name]
        parts = [part for part in group.needs(want, specs) if part.numel] if want.numel else []
        return _Origin(want, spec, describe(group.mapper), [source(part) for part in parts])
    chain = group.mapper
    states: list[Mapping[str, TensorSpec]] = [specs]
    for step in chain.steps:
        states.append(run([step], states[-1], lambda each, there: infer_step([each], there)))

    def back(region: Region, after: int) -> _Origin:
        found = chain.maker(region.name, after)
        if found is None:
            return source(region)
        number, maker = found
        return _trace_back(maker, region, states[number], lambda part: back(part, number))

    return back(want, len(chain.steps))


def _lines(origin: _Origin, first: str, rest: str, files: Mapping[str, str]) -> Iterator[str]:
    region, spec = origin.region, origin.spec
    line = f"{first}{region.name} {spec}"
    if region.shape != spec.shape:
        line += f" at [{', '.join(f'{o}:{o + n}' for o, n in zip(region.offset, region.shape))}]"
    if origin.by is None:
        nbytes, total = region.numel * spec.dtype.itemsize, spec.nbytes
        amount = f"all {describe_bytes(total)}" if nbytes == total else f"{nbytes} of {total} B"
        yield f"{line}: {amount} of {files.get(region.name) or 'the source'}"
        return
    yield f"{line} ← {origin.by}" if origin.inputs or not spec.numel else f"{line} ← {origin.by}, from nothing"
    shown = list(_elided(origin.inputs))
    for position, each in enumerate(shown):
        corner, below = ("└─ ", "   ") if position == len(shown) - 1 else ("├─ ", "│  ")
        if isinstance(each, int):
            yield f"{rest}{corner}… {each} more like these"
        else:
            yield from _lines(each, rest + corner, rest + below, files)


def _elided(inputs: Sequence[_Origin]) -> Iterator[_Origin | int]:
    """The inputs, or of a long row of those that are alike two, how many follow, and the last."""
    start = 0
    while start < len(inputs):
        stop = start
        while stop < len(inputs) and inputs[stop].kind == inputs[start].kind:
            stop += 1
        alike = inputs[start:stop]
        if len(alike) <= _ALIKE:
            yield from alike
        else:
            yield from alike[:2]
            yield len(alike) - 3
            yield alike[-1]
        start = stop
