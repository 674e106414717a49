"""Cutting a tensor into rectangles of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ._spec import Region, TensorSpec

TILE_ELEMENTS = 1 << 20
"""Elements of a rectangle; in float64 it takes 8 MiB, and arithmetic on it a few times that."""


def tiles(name: str, spec: TensorSpec, limit: int | None = None) -> Iterator[Region]:
    """Rectangles of at most `limit` elements that cover a tensor in the order of its elements; none if it is empty."""
    if spec.numel:
        yield from _cut(Region.whole(name, spec), 0, TILE_ELEMENTS if limit is None else limit)


def _cut(region: Region, dim: int, limit: int) -> Iterator[Region]:
    if region.numel <= limit or dim == len(region.shape):
        yield region
        return
    row = math.prod(region.shape[dim + 1 :])
    step = max(1, limit // row)
    start, end = region.offset[dim], region.offset[dim] + region.shape[dim]
    for first in range(start, end, step):
        yield from _cut(region.replaced(dim, first, min(step, end - first)), dim + 1, limit)
