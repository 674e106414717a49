"""Where the bytes of a region lie in files, and which of them are next to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

import attrs

from ._spec import Region, TensorSpec


@attrs.define(eq=False)
class Check:
    """The CRC-32 that a block should have; compared once, by whoever first reads of the block."""

    crc32: int
    done: bool = False
    lock: Lock = attrs.field(factory=Lock, repr=False)


@attrs.frozen
class Block:
    """A tensor that lies row by row in a file."""

    path: Path
    file_nbytes: int
    """Size of the file when it was opened: of another size, it is another file."""
    start: int
    """Of the tensor's first byte in the file."""
    spec: TensorSpec
    check: Check | None = None


@attrs.frozen
class Extent:
    """A rectangle of a block that holds a part of a region."""

    block: Block
    part: Region
    """What it is of the block; the name is for people."""
    index: tuple[slice, ...]
    """The index that cuts it out of the region."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.part.numel * self.block.spec.dtype.itemsize

    def cut(self, limit: int) -> Iterator[Region]:
        """The part in pieces of `limit` bytes at most (but not less than an element), in the order of the file."""
        return self.part.cut(max(1, limit // self.block.spec.dtype.itemsize))


@attrs.frozen
class Runs:
    """A region as runs of equal length that are contiguous both in a block and in memory."""

    nbytes: int
    """Length of each run."""
    starts: Sequence[int]
    """Of the runs in the block, ascending."""
    addresses: Sequence[int]
    """Of the runs in memory, from the region's first element."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape that lies row by row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def run_nbytes(stored: Sequence[int], shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Length of the runs that `find_runs` finds."""
    return _leading_dims(stored, shape, strides)[1] * itemsize


def find_runs(
    stored: Sequence[int], offset: Sequence[int], shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> Runs:
    """The runs of the region `[offset, offset + shape)` of a tensor of shape `stored`, for memory with `strides`."""
    rows = contiguous_strides(stored)
    dims, length = _leading_dims(stored, shape, strides)
    starts = [sum(first * row for first, row in zip(offset, rows)) * itemsize]
    addresses = [0]
    for dim in range(dims):
        if shape[dim] == 1:
            continue
        steps = range(0, shape[dim] * rows[dim] * itemsize, rows[dim] * itemsize)
        jumps = range(0, shape[dim] * strides[dim] * itemsize, strides[dim] * itemsize)
        starts = [start + step for start in starts for step in steps]
        addresses = [address + jump for address in addresses for jump in jumps]
    return Runs(length * itemsize, starts, addresses)


def _leading_dims(stored: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """How many leading dims the runs do not cover, and how many elements a run has."""
    rows = contiguous_strides(stored)
    length, dim = 1, len(shape)
    while dim and (shape[dim - 1] == 1 or rows[dim - 1] == strides[dim - 1] == length):
        dim -= 1
        length *= shape[dim]
    return dim, length


MAX_GAP = 4096
"""Nothing is gained by reading over longer gaps."""


def bridged(runs: Runs, limit: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Runs as reads of one stretch of the file each, of `limit` buffers at most.

    A gap is read over where it is at most a fiftieth of a run: what is read beyond what is needed stays below 2 %.

    Returns:
        For each read the start in the block, and buffers as (address, bytes), where address -1 is of a gap.
    """
    bridge = min(MAX_GAP, runs.nbytes // 50)
    start, end = 0, -1
    buffers: list[tuple[int, int]] = []
    for position, address in zip(runs.starts, runs.addresses):
        gap = position - end
        if not buffers or gap > bridge or len(buffers) + 2 > limit:
            if buffers:
                yield start, buffers
            start, buffers = position, []
        elif gap:
            buffers.append((-1, gap))
        last_address, last = buffers[-1] if buffers else (-1, 0)
        if last_address >= 0 and last_address + last == address:  # next to each other on both sides
            buffers[-1] = last_address, last + runs.nbytes
        else:
            buffers.append((address, runs.nbytes))
        end = position + runs.nbytes
    if buffers:
        yield start, buffers
