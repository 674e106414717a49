"""Cutting a tensor into rectangles of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

from ._spec import Region, TensorSpec

TILE_ELEMENTS = 1 << 20
"""Elements of a rectangle; in float64 it takes 8 MiB, and arithmetic on it a few times that."""


def tiles(name: str, spec: TensorSpec, limit: int | None = None) -> Iterator[Region]:
    """Rectangles of at most `limit` elements that cover a tensor in the order of its elements; none if it is empty."""
    if spec.numel:
        yield from Region.whole(name, spec).cut(TILE_ELEMENTS if limit is None else limit)
