"""Writing a model, spread over ranks, in the Hugging Face layout."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import agree, rank_of, size_of, together
from ._exchange import collect
from ._files import TensorFileWriter, write_text
from ._layout import Layout, gather_layout
from ._mapper import Group, Mapper
from ._names import natural_key
from ._problems import PlanError
from ._publish import published
from ._spec import Region, TensorSpec
from ._trace import trace

INDEX = "model.safetensors.index.json"


@attrs.frozen
class _Output:
    """A tensor to be written: what it is and what it is made from."""

    name: str
    spec: TensorSpec
    group: Group
    needs: Sequence[Region]


@attrs.frozen
class _Shard:
    """A file, its tensors, and the one rank that writes it."""

    file: str
    outputs: Sequence[_Output]
    owner: int


@torch.no_grad()
def export(
    state: Mapping[str, Tensor],
    mapper: Mapper,
    directory: str | PathLike[str],
    *,
    group: ProcessGroup | None = None,
    max_shard_bytes: int = 5 << 30,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Writes a model as `model.safetensors`, or as several files of that kind and their index. Collective.

    Files are cut by size alone, so they are the same bytes whatever the number of ranks. Each is written by one rank;
    the others send it their pieces, one tensor at a time. The directory appears when all of it is durable.

    Args:
        state: This rank's tensors or DTensors by name. Ranks may hold different names (stages of a pipeline); a plain
            tensor that several ranks hold is taken to be equal on them.
        mapper: From names of the model to names of the files: the inverse of what loads them.
        directory: Must not exist. All ranks must see one file system.
        group: The ranks that hold the model; by default all.
        max_shard_bytes: A file ends before the tensor that would make its data larger than this.
        extra_files: Text by file name, written beside the tensors (`config.json`); rank 0's is taken.

    Raises:
        PlanError: The mapper leaves out a tensor, or cannot map one; all problems are listed.
        FileExistsError: `directory` exists.
        PeerError: Another rank failed.
    """
    layout = gather_layout(state, group)
    with together(group):
        shards = _shards(_outputs(layout, mapper), layout, max_shard_bytes, size_of(group))
    with published(Path(directory), group) as partial:
        _write_shards(shards, layout, state, partial, group)
        with together(group):
            if rank_of(group) == 0:
                if len(shards) > 1:
                    write_text(partial / INDEX, _index(shards))
                for name, text in (extra_files or {}).items():
                    if Path(name).name != name:
                        raise ValueError(f"an extra file is a name without directories, got {name!r}")
                    write_text(partial / name, text)


def _outputs(layout: Layout, mapper: Mapper) -> list[_Output]:
    groups, specs, problems = trace(layout.specs, mapper)
    if problems:
        raise PlanError(problems)
    outputs = []
    for group in groups:
        for name in group.outputs:
            spec = specs[name]
            assert spec is not None, "only problems hide specs"
            needs = group.needs(Region.whole(name, spec), layout.specs) if spec.numel else []
            outputs.append(_Output(name, spec, group, needs))
    return sorted(outputs, key=lambda output: natural_key(output.name))


def _shards(outputs: Iterable[_Output], layout: Layout, max_bytes: int, ranks: int) -> list[_Shard]:
    """Cuts the outputs into files; each goes to the rank with fewest so far, among those to the one that has most."""
    runs: list[list[_Output]] = [[]]
    size = 0
    for output in outputs:
        if size + output.spec.nbytes > max_bytes and runs[-1]:
            runs.append([])
            size = 0
        runs[-1].append(output)
        size += output.spec.nbytes
    shards: list[_Shard] = []
    for number, run in enumerate(runs, start=1):
        held = [0] * ranks
        for output in run:
            for region in output.needs:
                for piece in layout.pieces[region.name]:
                    part = piece.region.intersect(region)
                    nbytes = part.numel * layout.specs[region.name].dtype.itemsize if part else 0
                    for holder in piece.holders:
                        held[holder] += nbytes
        owner = min(range(ranks), key=lambda rank: (sum(shard.owner == rank for shard in shards), -held[rank], rank))
        file = "model.safetensors" if len(runs) == 1 else f"model-{number:05d}-of-{len(runs):05d}.safetensors"
        shards.append(_Shard(file, run, owner))
    return shards


def _write_shards(
    shards: Sequence[_Shard], layout: Layout, state: Mapping[str, Tensor], directory: Path, group: ProcessGroup | None
) -> None:
    """Writes all files at the same time, tensor by tensor, in one order on all ranks."""
    rank = rank_of(group)
    with ExitStack() as files:
        with together(group):
            writers = {
                shard.file: files.enter_context(
                    TensorFileWriter(directory / shard.file, {output.name: output.spec for output in shard.outputs})
                )
                for shard in shards
                if shard.owner == rank
            }
        failure: Exception | None = None
        turns = itertools.zip_longest(*([(shard, output) for output in shard.outputs] for shard in shards))
        for shard, output in filter(None, itertools.chain.from_iterable(turns)):
            inputs = collect(output.needs, layout, state, shard.owner, group)
            if shard.owner != rank or failure is not None:
                continue
            try:
                writers[shard.file].write(output.name, _make(output, inputs))
            except Exception as error:  # noqa: BLE001  # others count on this rank to go on sending and receiving
                failure = error
        agree(failure, group)
        with together(group):
            files.close()  # makes the files durable


def _make(output: _Output, inputs: Mapping[Region, Tensor]) -> Tensor:
    if not output.spec.numel:
        return torch.empty(output.spec.shape, dtype=output.spec.dtype)
    return output.group.make(Region.whole(output.name, output.spec), inputs)


def _index(shards: Sequence[_Shard]) -> str:
    index = {
        "metadata": {"total_size": sum(output.spec.nbytes for shard in shards for output in shard.outputs)},
        "weight_map": {output.name: shard.file for shard in shards for output in shard.outputs},
    }
    return json.dumps(index, indent=2) + "\n"
