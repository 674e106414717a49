"""Views of an output into which its inputs can be read, so that nothing is copied to make it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from ._mapper import Mapper
from ._mappers import (
    Cast,
    Chunk,
    Concatenate,
    Identity,
    Prefix,
    Rename,
    Reshape,
    Slice,
    Squeeze,
    Stack,
    Tie,
    Transpose,
    Unsqueeze,
    Unstack,
)
from ._mappers._chain import Chain
from ._spec import Region


@functools.singledispatch
def input_views(mapper: Mapper, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    """Views of `into`, which shall hold `want`: one for each region that `mapper.pull(want)` names, in that order.

    Filling them makes the region. None where a mapper does more than to lay tensors out. The dtype of a view is that of
    the output: where it is not that of the input, what is read is cast on its way.
    """
    del mapper, want, into
    return None


@input_views.register(Identity)
@input_views.register(Rename)
@input_views.register(Tie)
@input_views.register(Chunk)
@input_views.register(Slice)
def _(mapper: Mapper, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    del mapper, want
    return [into]


@input_views.register
def _(mapper: Cast, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    del want
    # of several casts only one can be left to the reader
    return [into] if into.dtype == mapper.dtype else None


@input_views.register
def _(mapper: Squeeze, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    del want
    return [into.unsqueeze(mapper.dim)]


@input_views.register
def _(mapper: Unsqueeze, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    del want
    return [into.squeeze(mapper.dim)]


@input_views.register
def _(mapper: Reshape, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    pulled = mapper.pull(want) or ()
    if len(pulled) != 1 or not into.is_contiguous():
        return None
    return [into.view(pulled[0].shape)]


@input_views.register
def _(mapper: Transpose, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    del want
    return [into.transpose(*mapper.dims)]


@input_views.register
def _(mapper: Stack, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    del want
    return into.unbind(mapper.dim)


@input_views.register
def _(mapper: Unstack, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    del want
    return [into.unsqueeze(mapper.dim)]


@input_views.register
def _(mapper: Concatenate, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    lengths = [region.shape[mapper.dim] for region in mapper.pull(want) or ()]
    return list(into.split(lengths, mapper.dim))


@input_views.register
def _(mapper: Prefix, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    return input_views(mapper.mapper, want.renamed(want.name.removeprefix(mapper.output)), into)


@input_views.register
def _(mapper: Chain, want: Region, into: Tensor) -> Sequence[Tensor] | None:
    parts = [(want, into)]
    for step in reversed(mapper.steps):
        makers = {name: group.mapper for group in step for name in group.outputs}
        before: list[tuple[Region, Tensor]] = []
        for region, view in parts:
            maker = makers.get(region.name)
            if maker is None:
                before.append((region, view))
                continue
            views = input_views(maker, region, view)
            if views is None:
                return None
            before += zip(maker.pull(region) or (), views)
        parts = before
    return [view for _, view in parts]
