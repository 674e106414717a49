"""From one checkpoint to another, without a model."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import rank_of, require_alike, size_of, together
from ._files import sync_file, write_text
from ._fill import Target, batches_of, spec_after
from ._mapper import Group, Mapper
from ._plan import plan
from ._publish import published
from ._shards import INDEX, MAX_SHARD_BYTES, ShardFiles, companions, cut_shards, index_of, lines_of
from ._source import Source
from ._spec import Region, TensorSpec
from ._stream import MEMORY_BUDGET, Batch, Progress, run_batches


@attrs.frozen
class _Output:
    """A tensor as it is made, and as it is written."""

    made: TensorSpec
    written: TensorSpec


@torch.no_grad()
def convert(
    source: Source,
    mapper: Mapper,
    directory: str | PathLike[str],
    *,
    target: Mapping[str, TensorSpec] | None = None,
    waive: Collection[str] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    copy_from: str | PathLike[str] | None = None,
    group: ProcessGroup | None = None,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes what a mapper makes of a checkpoint, in the Hugging Face layout. Collective where there are ranks.

    Streams: memory holds one group, and little beside it, whatever the size of the model. Each rank writes files of
    its own, and reads only what they need. The files are the same bytes whatever the number of ranks, and the
    directory appears when all of it is durable.

    Args:
        source: The checkpoint: an opened one, or the tensors of a job checkpoint.
        mapper: From its names to those to be written.
        directory: Must not exist. All ranks must see one file system.
        target: What there shall be; without it, that no tensor of the source is left out is all that is proven.
        waive: Names or patterns of tensors in the source that may stay unused; `optimizer.*` are all that begin so.
        dtype: What floating tensors of 16 bits or more become; others, and all by default, stay as they are.
        max_shard_bytes: A file ends before the tensor that would make its data larger than this.
        copy_from: A directory whose config, tokenizer, templates, code and license (files in .json, .txt, .model,
            .jinja, .py, .tiktoken, .vocab, .spm, .yaml, .yml; LICENSE and NOTICE) are copied as they are, so that a
            dtype that `config.json` names stays there too. Not copied: weights, indexes, directories, hidden files.
        group: The ranks that share the work; by default all.
        memory_budget: Bytes of buffers at once. A group that needs more goes alone. By default what the inputs and
            outputs of the largest group have, so that one may be read while another is written; 32 MiB at least.
        progress: Called with the bytes that this rank has read so far, and in all, by the calling thread.

    Raises:
        PlanError: The mapper and the source do not fit, or make something else than `target`; all of it is listed.
        FileExistsError: `directory` exists.
        ReadError, ChecksumError: The source cannot be read, or is damaged.
        ValueError: Ranks were given different mappers or options.
        PeerError: Another rank failed.
    """
    with together(group):
        planned = plan(source, mapper, target, waive=waive)
        groups, specs = planned.groups, planned.outputs
        outputs = {name: _Output(spec, spec_after(spec, dtype)) for name, spec in specs.items()}
        shards = cut_shards(
            {name: output.written for name, output in outputs.items()},
            max_bytes=max_shard_bytes,
            ranks=size_of(group),
            held=lambda _: {},  # all is on disk
        )
        others = [] if copy_from is None else companions(Path(copy_from))
    require_alike([line for _, line in lines_of(shards)], group)
    with published(Path(directory), group) as partial:
        with together(group):
            own = [shard for shard in shards if shard.owner == rank_of(group)]
            with ShardFiles(partial, own) as files:
                mine = {name: outputs[name] for shard in own for name in shard.specs}
                batches = list(_batches(source, groups, mine, files))
                if memory_budget is None:
                    memory_budget = max(MEMORY_BUDGET, _largest(source, groups, specs))
                run_batches(batches, memory_budget=memory_budget, progress=progress)
        with together(group):
            if rank_of(group) == 0:
                if len(shards) > 1:
                    write_text(partial / INDEX, index_of(shards))
                for path in others:
                    shutil.copyfile(path, partial / path.name)
                    sync_file(partial / path.name)


def _largest(source: Source, groups: Sequence[Group], specs: Mapping[str, TensorSpec]) -> int:
    """Bytes of the inputs and outputs of the largest group."""
    sizes = (
        sum(source[name].nbytes for name in group.inputs) + sum(specs[name].nbytes for name in group.outputs)
        for group in groups
    )
    return max(sizes, default=0)


def _batches(
    source: Source, groups: Sequence[Group], outputs: Mapping[str, _Output], files: ShardFiles
) -> Iterator[Batch]:
    """Reads of `outputs`, each of which ends with its being written."""
    for group in groups:
        targets = []
        for name in group.outputs:
            output = outputs.get(name)
            if output is None:
                continue
            if output.made.numel:
                write = functools.partial(_write, files, name, output.written.dtype)
                extra = 0 if output.written == output.made else output.written.nbytes
                want = Region.whole(name, output.made)
                targets.append(Target(want, output.made.dtype, done=write, extra_nbytes=extra))
            else:
                files.write(name, torch.empty(output.written.shape, dtype=output.written.dtype))
        yield from batches_of(source, group, targets)


def _write(files: ShardFiles, name: str, dtype: torch.dtype, values: Tensor) -> None:
    files.write(name, values.to(dtype))
