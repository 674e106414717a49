"""Writing a model, spread over ranks, in the Hugging Face layout."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import rank_of, require_alike, size_of, together
from ._exchange import Collection, collect, held_bytes
from ._files import write_text
from ._fill import spec_after
from ._layout import Layout, gather_layout
from ._mapper import Group, Mapper
from ._problems import PlanError
from ._publish import published
from ._shards import INDEX, MAX_SHARD_BYTES, Shard, ShardFiles, cut_shards, index_of, lines_of, require_file_names
from ._spec import Region, TensorSpec
from ._trace import trace

IN_FLIGHT = 64 << 20
"""Bytes that a rank holds for pieces on their way, unless one tensor alone is more."""


@attrs.frozen
class _Output:
    """A tensor to be written: what it is in the file, and what it is made from."""

    name: str
    spec: TensorSpec
    group: Group
    needs: Sequence[Region]


@torch.no_grad()
def export(
    state: Mapping[str, Tensor],
    mapper: Mapper,
    directory: str | PathLike[str],
    *,
    group: ProcessGroup | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Writes a model as `model.safetensors`, or as several files of that kind and their index. Collective.

    Files are cut by size alone, so they are the same bytes whatever the number of ranks. Each is written by one rank,
    of those that have fewest files the one that holds most of it; the others send it their pieces, a few at a time.
    The directory appears when all of it is durable.

    Args:
        state: This rank's tensors or DTensors by name. Ranks may hold different names (stages of a pipeline); a plain
            tensor that several ranks hold is taken to be equal on them.
        mapper: From names of the model to names of the files: the inverse of what loads them.
        directory: Must not exist. All ranks must see one file system.
        group: The ranks that hold the model; by default all.
        max_shard_bytes: A file ends before the tensor that would make its data larger than this.
        dtype: What floating tensors of 16 bits or more become; others, and all by default, stay as they are.
        extra_files: Text by file name, written beside the tensors (`config.json`); rank 0's is taken.

    Raises:
        PlanError: The mapper leaves out a tensor, or cannot map one; all problems are listed.
        FileExistsError: `directory` exists.
        ValueError: Ranks disagree on a tensor, or were given different mappers or options.
        PeerError: Another rank failed.
    """
    layout = gather_layout(state, group)
    with together(group):
        require_file_names([*(extra_files or {})])
        outputs = _outputs(layout, mapper, dtype)
        shards = cut_shards(
            {name: output.spec for name, output in outputs.items()},
            max_bytes=max_shard_bytes,
            ranks=size_of(group),
            held=lambda name: held_bytes(outputs[name].needs, layout),
        )
    require_alike([f"{line}, from {outputs[name].needs}" for name, line in lines_of(shards)], group)
    with published(Path(directory), group) as partial:
        with (
            together(group),
            ShardFiles(partial, [shard for shard in shards if shard.owner == rank_of(group)]) as files,
        ):
            fly = functools.partial(collect, layout=layout, state=state, group=group)
            _write_shards(shards, outputs, fly, files, rank_of(group))
        with together(group):
            if rank_of(group) == 0:
                if len(shards) > 1:
                    write_text(partial / INDEX, index_of(shards))
                for name, text in (extra_files or {}).items():
                    write_text(partial / name, text)


def _outputs(layout: Layout, mapper: Mapper, dtype: torch.dtype | None) -> dict[str, _Output]:
    groups, specs, problems = trace(layout.specs, mapper)
    if problems:
        raise PlanError(problems)
    outputs = {}
    for group in groups:
        for name in group.outputs:
            spec = specs[name]
            assert spec is not None, "only problems hide specs"
            needs = group.needs(Region.whole(name, spec), layout.specs) if spec.numel else []
            outputs[name] = _Output(name, spec_after(spec, dtype), group, needs)
    return outputs


def _write_shards(
    shards: Sequence[Shard],
    outputs: Mapping[str, _Output],
    fly: Callable[[Sequence[Region], int], Collection],
    files: ShardFiles,
    rank: int,
) -> None:
    """Writes files of all ranks at the same time, tensor by tensor, in one order on all ranks.

    Args:
        shards: All files.
        outputs: Their tensors.
        fly: Starts to collect regions on a rank.
        files: Those of this rank.
        rank: This one.
    """
    failure: Exception | None = None
    flying: deque[tuple[int, _Output, Collection]] = deque()

    def land() -> None:
        """Ends the oldest collection, and writes it where it is ours."""
        nonlocal failure
        owner, output, collection = flying.popleft()
        inputs = collection.wait()
        if owner != rank or failure is not None:
            return
        try:
            files.write(output.name, _make(output, inputs))
        except Exception as error:  # noqa: BLE001  # others count on this rank to go on sending and receiving
            failure = error

    for owner, name in _turns(shards):
        # what the oldest waits for, others have started or come to next: no two wait for each other
        while sum(collection.nbytes for _, _, collection in flying) > IN_FLIGHT:
            land()
        flying.append((owner, outputs[name], fly(outputs[name].needs, owner)))
    while flying:
        land()
    if failure is not None:
        raise failure


def _turns(shards: Sequence[Shard]) -> Iterator[tuple[int, str]]:
    """Owners and names: of each owner's first file the first tensor, then the second ..., so that all have work."""
    own: dict[int, list[tuple[int, str]]] = {}
    for shard in shards:
        own.setdefault(shard.owner, []).extend((shard.owner, name) for name in shard.specs)
    for turn in itertools.zip_longest(*own.values()):
        yield from filter(None, turn)


def _make(output: _Output, inputs: Mapping[Region, Tensor]) -> Tensor:
    if not output.spec.numel:
        return torch.empty(output.spec.shape, dtype=output.spec.dtype)
    return output.group.make(Region.whole(output.name, output.spec), inputs).to(output.spec.dtype)
