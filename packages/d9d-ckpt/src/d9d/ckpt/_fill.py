"""From a group of a plan to reads: what is read where, and what is made of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ._buffer import buffer
from ._hands import Fill
from ._input_views import input_views
from ._mapper import Group
from ._source import Source
from ._spec import Region, TensorSpec
from ._stream import Batch

_Views = Callable[[Tensor], Sequence[Tensor] | None]


@attrs.frozen(eq=False)
class Target:
    """A non-empty region of an output that is wanted."""

    want: Region
    dtype: torch.dtype
    into: Tensor | None = None
    """Where it shall be; None for a tensor that lives until `done` returns."""
    done: Callable[[Tensor], None] | None = None
    """Called with the region, when it is there."""
    extra_nbytes: int = 0
    """What `done` allocates."""
    alone: bool = False
    """Whether another target has some of the same memory."""

    @property
    def nbytes(self) -> int:
        """Size of the region in bytes."""
        return self.want.numel * self.dtype.itemsize

    def put(self, made: Tensor) -> None:
        """Takes the region from elsewhere."""
        if self.into is not None:
            self.into.copy_(made)
        if self.done is not None:
            self.done(made)


def batches_of(source: Source, group: Group, targets: Sequence[Target]) -> Iterator[Batch]:
    """The reads that fill regions of a group's outputs.

    A batch for all that need the whole group, and one for those that are made of the same regions.
    """
    whole: list[Target] = []
    alike: dict[Hashable, tuple[Sequence[Region], _Views | None, list[Target]]] = {}
    for target in targets:
        needs = group.mapper.pull(target.want)
        if needs is None:
            whole.append(target)
            continue
        views = _views_of(group, target, needs)
        # where targets share memory, the later one is made anew; of others with a dtype, views hold the same values
        key = target if target.alone else (tuple(needs), views and target.dtype)
        alike.setdefault(key, (needs, views, []))[2].append(target)
    if whole:
        yield _of_whole_group(source, group, whole)
    for needs, views, some in alike.values():
        if views is None:
            yield _of_copies(source, group, some, list(dict.fromkeys(needs)))
        else:
            yield _in_place(source, group, some, needs, views)


def _views_of(group: Group, target: Target, needs: Sequence[Region]) -> _Views | None:
    """What makes the views of a target's memory into which `needs` can be read; None where they must be copied."""
    views = functools.partial(input_views, group.mapper, target.want)
    # a tensor with strides of its own may have no view of some shape; one to be made is contiguous
    into = torch.empty(target.want.shape, dtype=target.dtype, device="meta") if target.into is None else target.into
    return None if len(set(needs)) < len(needs) or views(into) is None else views


def _in_place(source: Source, group: Group, targets: Sequence[Target], needs: Sequence[Region], views: _Views) -> Batch:
    """Reads regions to where they belong in the first of the targets, and makes the others of what is there."""
    first, *others = targets
    values: list[Tensor] = []

    def parts() -> Mapping[Region, Tensor]:
        views_of_needs = views(values[0])
        assert views_of_needs is not None, "there were, of a tensor with these strides"
        return dict(zip(needs, views_of_needs, strict=True))

    def start() -> Iterator[Fill]:
        values.append(buffer(first.want.shape, first.dtype) if first.into is None else first.into)
        for region, part in parts().items():
            yield from _fills(source, region, part)

    def finish() -> None:
        if first.done is not None:
            first.done(values[0])
        for other in others:
            other.put(group.make(other.want, parts()))
        values.clear()  # the batch lives on, its memory must not

    held = (0 if first.into is not None else first.nbytes) + max(target.extra_nbytes for target in targets)
    return Batch(_nbytes(source, needs), held, start, finish, first.alone)


def _of_copies(source: Source, group: Group, targets: Sequence[Target], needs: Sequence[Region]) -> Batch:
    """Reads the regions that make regions of outputs, makes these one after the other, copies them."""
    inputs: dict[Region, Tensor] = {}

    def finish() -> None:
        for target in targets:
            target.put(group.make(target.want, inputs))
        inputs.clear()  # the batch lives on, its memory must not

    nbytes = _nbytes(source, needs)
    held = nbytes + max(target.nbytes + target.extra_nbytes for target in targets)
    return Batch(nbytes, held, lambda: _fresh(source, needs, inputs), finish, targets[0].alone)


def _of_whole_group(source: Source, group: Group, targets: Sequence[Target]) -> Batch:
    """Reads all inputs, makes all outputs, copies what is wanted of them."""
    inputs: dict[Region, Tensor] = {}
    needs = [Region.whole(name, source[name]) for name in group.inputs]
    made = sum(spec.nbytes for spec in group.mapper.infer({name: source[name] for name in group.inputs}).values())

    def finish() -> None:
        outputs = group.mapper.apply({region.name: tensor for region, tensor in inputs.items()})
        inputs.clear()
        for target in targets:
            values = outputs[target.want.name][target.want.slices]
            if values.shape != target.want.shape:
                raise ValueError(f"{group.mapper!r} made {list(outputs[target.want.name].shape)} of {target.want}")
            target.put(values)

    nbytes = _nbytes(source, needs)
    held = nbytes + made + max(target.extra_nbytes for target in targets)
    alone = any(target.alone for target in targets)
    return Batch(nbytes, held, lambda: _fresh(source, needs, inputs), finish, alone)


def _fresh(source: Source, needs: Sequence[Region], inputs: dict[Region, Tensor]) -> Iterator[Fill]:
    """Reads regions into `inputs`."""
    for region in needs:
        inputs[region] = buffer(region.shape, source[region.name].dtype)
        yield from _fills(source, region, inputs[region])


def _fills(source: Source, region: Region, into: Tensor) -> Iterator[Fill]:
    extents = source.extents(region)
    if extents is None:
        into.copy_(source.read(region))
        return
    for extent in extents:
        yield Fill(extent, into[extent.index])


def _nbytes(source: Source, needs: Sequence[Region]) -> int:
    return sum(region.numel * source[region.name].dtype.itemsize for region in needs)


def spec_after(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """The spec of a tensor once it is cast: only floating tensors of 16 bits or more are.

    Smaller ones are quantized: without their scales a cast would make other numbers of them.

    Raises:
        ValueError: `dtype` is not floating: whole numbers are not what weights are.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype of torch is needed, such as torch.bfloat16, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"floating tensors become another floating dtype, got {dtype}: use Cast for others")
    floating = spec.dtype.is_floating_point and spec.dtype.itemsize > 1
    return spec if dtype is None or not floating else attrs.evolve(spec, dtype=dtype)
