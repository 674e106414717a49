"""Loading a checkpoint into the tensors of a model, in place."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ._fill import Target, batches_of
from ._local import local_part, require_dense, require_tensors
from ._mapper import Group, Mapper
from ._plan import plan
from ._problems import PlanError
from ._source import Source
from ._spec import TensorSpec
from ._stream import MEMORY_BUDGET, Batch, Progress, run_batches, settle


@torch.no_grad()
def load(
    source: Source,
    mapper: Mapper,
    state: Mapping[str, Tensor],
    *,
    target: Mapping[str, TensorSpec] | None = None,
    waive: Collection[str] = (),
    memory_budget: int = MEMORY_BUDGET,
    progress: Progress | None = None,
) -> None:
    """Fills `state` from a checkpoint, reading only the regions that this rank holds.

    Not a collective: each rank may call it for the tensors it has. Everything is checked before the first is written.
    Where a mapper only lays tensors out, bytes go from the file to where they belong; else the inputs of a group are
    read into buffers first. Tensors on a GPU are filled by way of small pinned buffers.

    Args:
        source: The checkpoint.
        mapper: From names of the checkpoint to names of the model.
        state: Plain tensors or DTensors by name. Names may share a tensor; it gets the last one's values, in the order
            in which the plan has them.
        target: The whole model, where `state` is only a part of it (a pipeline stage); by default `state` is whole.
        waive: Names or patterns of tensors in the checkpoint that may stay unused; `optimizer.*` are all that begin so.
        memory_budget: Bytes of buffers at once. A group that needs more goes alone.
        progress: Called with the bytes read so far and in all, from 0 on, by the calling thread.

    Raises:
        PlanError: The mapper does not make exactly `target`, or `state` is not a part of it; all problems are listed.
        ReadError: A file was cut or changed, or cannot be read. Part of `state` may be filled.
        ValueError: A tensor has no memory, as it is on meta, or less than it has elements; all are listed.
    """
    require_tensors(state)
    specs = {name: TensorSpec.of(tensor) for name, tensor in state.items()}
    planned = plan(source, mapper, specs if target is None else target, select=state.keys(), waive=waive)
    differing = [
        f"{name!r} is {spec}, but in the target {planned.outputs[name]}"
        for name, spec in specs.items()
        if spec != planned.outputs[name]
    ]
    if differing:
        raise PlanError(differing)
    jobs: list[tuple[Group, Target]] = []
    for group in planned.groups:
        for name in group.outputs:
            if name in state:
                local, want = local_part(name, state[name])
                jobs.append((group, Target(want, local.dtype, local)))
    fill_targets(source, jobs, memory_budget=memory_budget, progress=progress)


def fill_targets(
    source: Source, jobs: Sequence[tuple[Group, Target]], *, memory_budget: int, progress: Progress | None
) -> None:
    """Fills tensors that are there, by their groups; of several that are one tensor, the last."""
    jobs = [(group, target) for group, target in jobs if target.want.numel]
    require_memory({target.want.name: target.into for _, target in jobs if target.into is not None})
    jobs = _of_distinct_memory(jobs)
    settle(target.into for _, target in jobs if target.into is not None)
    batches = [
        batch
        for _, some in itertools.groupby(jobs, key=lambda job: id(job[0]))
        for batch in _batches(source, list(some))
    ]
    run_batches(batches, memory_budget=memory_budget, progress=progress)


def _batches(source: Source, jobs: Sequence[tuple[Group, Target]]) -> Iterator[Batch]:
    return batches_of(source, jobs[0][0], [target for _, target in jobs])


def require_memory(tensors: Mapping[str, Tensor]) -> None:
    """Raises a ValueError that lists the tensors on meta, or else sparse ones, or those whose elements share memory."""
    absent = [name for name, tensor in tensors.items() if tensor.is_meta]
    if absent:
        raise ValueError(f"tensors on meta have no memory to load into, call `to_empty` first: {absent!r}")
    require_dense(tensors)
    expanded = [name for name, tensor in tensors.items() if _is_expanded(tensor)]
    if expanded:
        raise ValueError(f"elements of expanded tensors share their memory, call `contiguous` first: {expanded!r}")


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape))


@attrs.frozen
class _Memory:
    """Which bytes a tensor has, and how it looks at them."""

    storage: int
    start: int
    end: int
    view: tuple[object, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Memory:
        """The memory of `tensor`; that of a subclass is taken to be its own."""
        if type(tensor) is not Tensor:
            return cls(id(tensor), 0, 0, ())
        span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
        start, end = tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
        return cls(tensor.untyped_storage().data_ptr(), start, end, (tensor.shape, tensor.stride(), tensor.dtype))


def _of_distinct_memory(jobs: Sequence[tuple[Group, Target]]) -> list[tuple[Group, Target]]:
    """Without those whose tensor a later one fills; those that share a part of their memory are marked."""
    last = {_Memory.of(target.into): (group, target) for group, target in jobs if target.into is not None}
    kept = {id(target) for _, target in last.values()}
    shared: set[int] = set()
    reach: dict[int, tuple[int, int]] = {}  # by storage, how far those before go, and which does
    for memory in sorted(last, key=lambda memory: (memory.storage, memory.start)):
        end, furthest = reach.get(memory.storage, (0, 0))
        mine = id(last[memory][1])
        if memory.start < end:
            shared |= {furthest, mine}
        if memory.end > end:
            reach[memory.storage] = memory.end, mine
    return [(group, attrs.evolve(target, alone=id(target) in shared)) for group, target in jobs if id(target) in kept]
