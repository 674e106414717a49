"""What is known of a tensor without its data: its spec, and rectangular regions of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import attrs
import torch
from torch import Tensor


def _dims(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen
class TensorSpec:
    """Shape and dtype of a named tensor; for a DTensor the global shape."""

    shape: tuple[int, ...] = attrs.field(converter=_dims)
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of `tensor`, which may be on meta or a DTensor."""
        return cls(tensor.shape, tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@attrs.frozen
class Region:
    """The rectangle `[offset, offset + shape)` of the tensor called `name`."""

    name: str
    offset: tuple[int, ...] = attrs.field(converter=_dims)
    shape: tuple[int, ...] = attrs.field(converter=_dims)

    @classmethod
    def whole(cls, name: str, spec: TensorSpec) -> Region:
        """All of a tensor."""
        return cls(name, (0,) * len(spec.shape), spec.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this region out of its tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape))

    def renamed(self, name: str) -> Region:
        """The same rectangle of another tensor."""
        return Region(name, self.offset, self.shape)

    def replaced(self, dim: int, offset: int, length: int) -> Region:
        """The same rectangle with another interval on `dim`."""
        return Region(
            self.name,
            (*self.offset[:dim], offset, *self.offset[dim + 1 :]),
            (*self.shape[:dim], length, *self.shape[dim + 1 :]),
        )

    def with_dim(self, dim: int, offset: int, length: int) -> Region:
        """The same rectangle of a tensor that has a further dim before `dim`, and an interval on it."""
        return Region(
            self.name,
            (*self.offset[:dim], offset, *self.offset[dim:]),
            (*self.shape[:dim], length, *self.shape[dim:]),
        )

    def without_dim(self, dim: int) -> Region:
        """The same rectangle of a tensor that lacks a dim."""
        return Region(
            self.name, (*self.offset[:dim], *self.offset[dim + 1 :]), (*self.shape[:dim], *self.shape[dim + 1 :])
        )

    def cut(self, limit: int) -> Iterator[Region]:
        """Rectangles of at most `limit` elements, which is 1 or more, that cover it in the order of its elements."""
        if self.numel <= limit:
            yield self
            return
        dim = next(dim for dim, length in enumerate(self.shape) if length > 1)
        step = max(1, limit // math.prod(self.shape[dim + 1 :]))
        start, stop = self.offset[dim], self.offset[dim] + self.shape[dim]
        for first in range(start, stop, step):
            yield from self.replaced(dim, first, min(step, stop - first)).cut(limit)

    def is_within(self, spec: TensorSpec) -> bool:
        """Whether a tensor of this spec has all of it."""
        return len(self.offset) == len(self.shape) == len(spec.shape) and all(
            offset >= 0 and length >= 0 and offset + length <= extent
            for offset, length, extent in zip(self.offset, self.shape, spec.shape)
        )

    def intersect(self, other: Region) -> Region | None:
        """What both regions of one tensor cover; None where that is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(mine + length, theirs + extent)
            for mine, length, theirs, extent in zip(self.offset, self.shape, other.offset, other.shape)
        )
        shape = tuple(end - start for start, end in zip(offset, ends))
        return Region(self.name, offset, shape) if all(length > 0 for length in shape) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """The index that cuts this region out of a tensor that holds just `outer`."""
        return tuple(
            slice(start - base, start - base + length)
            for start, base, length in zip(self.offset, outer.offset, self.shape)
        )
