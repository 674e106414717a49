"""Views of an output into which its inputs can be read, so that nothing is copied to make it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor

from ._mapper import Mapper
from ._mappers import Chunk, Concatenate, Prefix, Rename, Stack, Transpose, Unstack
from ._mappers._chain import Chain
from ._spec import Region


@functools.singledispatch
def input_views(mapper: Mapper, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    """Views of `into`, which shall hold `want`: one for each region that `mapper.pull(want)` names, by its name.

    Filling them makes the region. None where a mapper does more than to lay tensors out.
    """
    del mapper, want, into
    return None


@input_views.register
def _(mapper: Rename, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    del want
    return {mapper.input.name: into}


@input_views.register
def _(mapper: Transpose, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    del want
    return {mapper.input.name: into.transpose(*mapper.dims)}


@input_views.register
def _(mapper: Stack, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    return dict(zip((region.name for region in mapper.pull(want) or ()), into.unbind(mapper.dim)))


@input_views.register
def _(mapper: Unstack, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    del want
    return {mapper.input.name: into.unsqueeze(mapper.dim)}


@input_views.register
def _(mapper: Concatenate, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    regions = mapper.pull(want) or ()
    lengths = [region.shape[mapper.dim] for region in regions]
    return dict(zip((region.name for region in regions), into.split(lengths, mapper.dim)))


@input_views.register
def _(mapper: Chunk, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    del want
    return {mapper.input.name: into}


@input_views.register
def _(mapper: Prefix, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    inner = want.renamed(want.name.removeprefix(mapper.output))
    views = input_views(mapper.mapper, inner, into)
    return None if views is None else {mapper.input + name: view for name, view in views.items()}


@input_views.register
def _(mapper: Chain, want: Region, into: Tensor) -> Mapping[str, Tensor] | None:
    makers = [{name: group.mapper for group in step for name in group.outputs} for step in mapper.steps]
    parts = [(want, into)]
    for maker in reversed(makers):
        before: list[tuple[Region, Tensor]] = []
        for region, view in parts:
            if region.name not in maker:
                before.append((region, view))
                continue
            pulled = maker[region.name].pull(region)
            views = input_views(maker[region.name], region, view)
            if pulled is None or views is None:
                return None
            before += [(part, views[part.name]) for part in pulled]
        parts = before
    views = {region.name: view for region, view in parts}
    return views if len(views) == len(parts) else None  # one input in several places is read once and copied
