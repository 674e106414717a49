"""A leaf that splits and merges dims, and which rectangles of one shape are a rectangle of another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from .._mapper import Group
from .._names import Pattern, as_pattern, require_same_fields
from .._spec import Region, TensorSpec
from ._one import bind_one

_MOST_PARTS = 4096
"""Regions beyond which the whole tensor is read: so many small reads cost more."""

Interval = tuple[int, int]
Rectangle = tuple[Interval, ...]


def _shape(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen
class Reshape:
    """Gives a tensor another shape with the same elements in the same order.

    `Reshape("q.weight", "q.heads", input_shape=(4096, 1024), output_shape=(32, 128, 1024))`: from both shapes the
    parts of the input that are a slice of the output are found without reading anything.
    """

    input: Pattern = attrs.field(converter=as_pattern)
    output: Pattern = attrs.field(converter=as_pattern)
    input_shape: tuple[int, ...] = attrs.field(kw_only=True, converter=_shape)
    output_shape: tuple[int, ...] = attrs.field(kw_only=True, converter=_shape)

    def __attrs_post_init__(self) -> None:
        require_same_fields(self.input, self.output)
        if min((*self.input_shape, *self.output_shape), default=0) < 0:
            raise ValueError(f"lengths must not be negative, got {self.input_shape!r} and {self.output_shape!r}")
        if math.prod(self.input_shape) != math.prod(self.output_shape):
            raise ValueError(f"{self.input_shape!r} and {self.output_shape!r} differ in their number of elements")

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        return bind_one(self, names)

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        spec = specs[self.input.name]
        if spec.shape != self.input_shape:
            raise ValueError(
                f"cannot reshape {self.input!r}, which is {spec}, from {list(self.input_shape)} "
                f"to {list(self.output_shape)}"
            )
        return {self.output.name: TensorSpec(self.output_shape, spec.dtype)}

    def pull(self, want: Region) -> Sequence[Region] | None:
        blocks = self._rectangles(want)
        if math.prod(map(len, blocks)) > _MOST_PARTS:
            return None
        regions = []
        for chosen in itertools.product(*blocks):
            intervals = list(itertools.chain.from_iterable(chosen))
            offset, shape = [start for start, _ in intervals], [stop - start for start, stop in intervals]
            regions.append(Region(self.input.name, offset, shape))
        return regions

    def assemble(self, want: Region, parts: Sequence[Tensor]) -> Tensor:
        blocks = self._rectangles(want)
        # each rectangle is contiguous within its block of dims, so that a block is one dim here
        flat: list[Tensor] = [
            part.reshape([math.prod(stop - start for start, stop in rectangle) for rectangle in chosen])
            for part, chosen in zip(parts, itertools.product(*blocks))
        ]
        for dim in reversed(range(len(blocks))):
            count = len(blocks[dim])
            if count > 1:
                flat = [torch.cat(flat[start : start + count], dim) for start in range(0, len(flat), count)]
        return flat[0].reshape(want.shape)

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.output.name: tensors[self.input.name].reshape(self.output_shape)}

    def inverse(self) -> Reshape:
        return Reshape(self.output, self.input, input_shape=self.output_shape, output_shape=self.input_shape)

    def _rectangles(self, want: Region) -> list[list[Rectangle]]:
        """For each block of dims, the rectangles of the input in the order of their elements in `want`."""
        found = []
        for theirs, mine in _blocks(self.input_shape, self.output_shape):
            runs = _runs(self.output_shape[mine], want.offset[mine], want.shape[mine])
            shape = self.input_shape[theirs]
            rectangles = (rectangle for start, stop in runs for rectangle in _cut(start, stop, shape))
            found.append(list(itertools.islice(rectangles, _MOST_PARTS + 1)))
        return found


def _blocks(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The finest cuts of two shapes, none of whose lengths is 0, into dims that hold equally many elements."""
    i = j = 0
    while i < len(first) or j < len(second):
        start_i, start_j = i, j
        product_i = product_j = 1
        if i < len(first):
            product_i, i = first[i], i + 1
        if j < len(second):
            product_j, j = second[j], j + 1
        while product_i != product_j:
            if product_i < product_j:
                product_i, i = product_i * first[i], i + 1
            else:
                product_j, j = product_j * second[j], j + 1
        yield slice(start_i, i), slice(start_j, j)


def _runs(shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> Iterator[Interval]:
    """The intervals of row-major positions in a tensor of `shape` that a rectangle of it covers, in order."""
    inner = len(shape)
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    # dims from `inner` on are whole; the one before them is cut, those before it give a run for each index
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = max(inner - 1, 0)
    length = math.prod(lengths[cut:])
    base = sum(start * stride for start, stride in zip(offset[cut:], strides[cut:]))
    for index in itertools.product(*(range(o, o + n) for o, n in zip(offset[:cut], lengths[:cut]))):
        start = base + sum(position * stride for position, stride in zip(index, strides))
        yield start, start + length


def _cut(start: int, stop: int, shape: Sequence[int]) -> Iterator[Rectangle]:
    """The fewest rectangles of a tensor of `shape` that are the row-major positions `[start, stop)`, in order."""
    if not shape:
        yield ()
        return
    row_size = math.prod(shape[1:])
    whole = tuple((0, length) for length in shape[1:])
    row, within = divmod(start, row_size)
    if within:
        end = min(stop - row * row_size, row_size)
        yield from (((row, row + 1), *rest) for rest in _cut(within, end, shape[1:]))
        row += 1
    last, rest_of_last = divmod(stop, row_size)
    if row < last:
        yield ((row, last), *whole)
    if rest_of_last and row <= last:
        yield from (((last, last + 1), *rest) for rest in _cut(0, rest_of_last, shape[1:]))
