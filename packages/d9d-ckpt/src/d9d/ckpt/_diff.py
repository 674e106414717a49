"""Differences between two checkpoints, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs

from ._compare import compare
from ._names import natural_key, quote_with_nearest
from ._source import Source
from ._spec import Region, TensorSpec
from ._tiles import tiles


@attrs.frozen(kw_only=True)
class TensorDifference:
    """How a tensor that both have differs."""

    name: str
    left: TensorSpec
    right: TensorSpec
    compared: bool
    """Whether values were compared: not those of other shapes, nor of other dtypes unless asked to."""
    unequal: int = 0
    """How many elements differ at all."""
    beyond: int = 0
    """How many differ by more than the tolerance."""
    max_abs: float = 0.0
    """Largest `abs(left - right)`; infinite between NaN and a number."""
    max_rel: float = 0.0
    """Largest `abs(left - right) / abs(right)`; infinite where `right` is 0."""
    worst: tuple[int, ...] | None = None
    """Index of the element beyond the tolerance that is farthest off."""
    worst_abs: float = 0.0
    """How far off that is."""

    @property
    def tolerated(self) -> bool:
        """Whether it differs within the tolerance only."""
        return self.compared and not self.beyond

    def __str__(self) -> str:
        specs = str(self.left) if self.left == self.right else f"{self.left} and {self.right}"
        if not self.compared:
            return f"{self.name!r} is {specs}"
        how = f"{self.beyond} of {self.left.numel} beyond the tolerance" if self.beyond else "within the tolerance"
        where = "" if self.worst is None else f", worst {self.worst_abs:.3g} at {list(self.worst)}"
        return f"{self.name!r}, {specs}: {how}, max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}{where}"


@attrs.frozen(kw_only=True)
class Difference:
    """All that differs between two checkpoints; prints as one line for each."""

    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    """Those that differ, also within the tolerance, in natural order."""
    equal: int
    """How many tensors are the same."""

    @property
    def same(self) -> bool:
        """Whether the checkpoints have the same tensors, within the tolerance."""
        return not self.only_left and not self.only_right and all(tensor.tolerated for tensor in self.tensors)

    def __str__(self) -> str:
        lines = [f"only in the first: {name}" for name in quote_with_nearest(self.only_left, self.only_right)]
        lines += [f"only in the second: {name}" for name in quote_with_nearest(self.only_right, self.only_left)]
        lines += map(str, self.tensors)
        return "\n  ".join([f"{self.equal} tensors are equal, {len(lines)} are not", *lines])


def diff(
    left: Source,
    right: Source,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    promote: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Difference:
    """Compares two checkpoints, a bounded piece of a tensor at a time.

    An element differs unless `abs(left - right) <= atol + rtol * abs(right)`, where NaN equals NaN. Without a
    tolerance bits are compared, so that -0.0 differs from 0.0 and a NaN from one with another payload.

    Args:
        left: One checkpoint.
        right: The other, to whose values `rtol` is relative.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        promote: Whether tensors of other dtypes are compared, by value in float64, instead of being different.
        progress: Called with the bytes compared so far and in all.

    Raises:
        ValueError: A tolerance is negative or NaN, or a checkpoint is damaged.
    """
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if math.isnan(tolerance) or tolerance < 0:
            raise ValueError(f"{name} must be 0 or more, got {tolerance!r}")
    both = sorted(left.keys() & right.keys(), key=natural_key)
    total = sum(left[name].nbytes for name in both)
    found: list[TensorDifference] = []
    done = 0
    for name in both:
        compared = left[name].shape == right[name].shape and (promote or left[name].dtype == right[name].dtype)
        difference = TensorDifference(name=name, left=left[name], right=right[name], compared=compared)
        for tile in tiles(name, left[name]) if compared else ():
            difference = _add_tile(difference, tile, left, right, rtol=rtol, atol=atol)
            done += tile.numel * left[name].dtype.itemsize
            if progress is not None:
                progress(done, total)
        if not compared:
            done += left[name].nbytes
        if difference.unequal or not compared:
            found.append(difference)
    return Difference(
        only_left=_only(left, right), only_right=_only(right, left), tensors=tuple(found), equal=len(both) - len(found)
    )


def _add_tile(
    so_far: TensorDifference, tile: Region, left: Source, right: Source, *, rtol: float, atol: float
) -> TensorDifference:
    found = compare(left.read(tile), right.read(tile), rtol=rtol, atol=atol)
    if not found.unequal:
        return so_far
    if found.worst is not None and (so_far.worst is None or found.worst_abs > so_far.worst_abs):
        so_far = attrs.evolve(so_far, worst=_index(found.worst, tile), worst_abs=found.worst_abs)
    return attrs.evolve(
        so_far,
        unequal=so_far.unequal + found.unequal,
        beyond=so_far.beyond + found.beyond,
        max_abs=max(so_far.max_abs, found.max_abs),
        max_rel=max(so_far.max_rel, found.max_rel),
    )


def _index(flat: int, tile: Region) -> tuple[int, ...]:
    """The index in the whole tensor of an element of a tile."""
    index = []
    for offset, length in zip(reversed(tile.offset), reversed(tile.shape)):
        index.append(offset + flat % length)
        flat //= length
    return tuple(reversed(index))


def _only(these: Mapping[str, TensorSpec], others: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    return tuple(sorted(these.keys() - others.keys(), key=natural_key))
