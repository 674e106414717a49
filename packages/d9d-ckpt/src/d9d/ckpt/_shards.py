"""The files of a checkpoint in the Hugging Face layout: which tensor is in which, and who writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
from torch import Tensor

from ._files import TensorFileWriter
from ._index import fault_of_file_name
from ._manifest import MANIFEST, job_directory
from ._names import natural_key
from ._spec import TensorSpec

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 << 30
_MAX_OPEN = 64
"""Files open at a time; systems allow a process 256 or 1024."""
_COPIED = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".spm", ".yaml", ".yml"}
_COPIED_STEMS = {"LICENSE", "NOTICE"}


@attrs.frozen
class Shard:
    """A file, its tensors in natural order, and the one rank that writes it."""

    file: str
    specs: Mapping[str, TensorSpec]
    owner: int

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(spec.nbytes for spec in self.specs.values())


def cut_shards(
    specs: Mapping[str, TensorSpec], *, max_bytes: int, ranks: int, held: Callable[[str], Mapping[int, int]]
) -> list[Shard]:
    """Cuts tensors into files by size alone, and gives each file to a rank.

    Ranks get as many files as others, or one more; within that a file goes to the rank that holds most of its bytes.

    Args:
        specs: The tensors.
        max_bytes: A file ends before the tensor that would make its data larger than this.
        ranks: Number of ranks.
        held: How many bytes of a tensor ranks have already.
    """
    if not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"max_shard_bytes must be a whole number of at least 1, got {max_bytes!r}")
    runs: list[list[str]] = [[]]
    size = 0
    for name in sorted(specs, key=natural_key):
        if size + specs[name].nbytes > max_bytes and runs[-1]:
            runs.append([])
            size = 0
        runs[-1].append(name)
        size += specs[name].nbytes
    shards: list[Shard] = []
    owned = [0] * ranks
    most = -(-len(runs) // ranks)
    for number, run in enumerate(runs, start=1):
        local = [0] * ranks
        for name in run:
            for rank, nbytes in held(name).items():
                local[rank] += nbytes
        able = [rank for rank in range(ranks) if owned[rank] < most]
        owner = min(able, key=lambda rank: (-local[rank], owned[rank], rank))
        owned[owner] += 1
        file = "model.safetensors" if len(runs) == 1 else f"model-{number:05d}-of-{len(runs):05d}.safetensors"
        shards.append(Shard(file, {name: specs[name] for name in run}, owner))
    return shards


def index_of(shards: Sequence[Shard]) -> str:
    """The index of several files, as JSON."""
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.specs},
    }
    return json.dumps(index, indent=2) + "\n"


def lines_of(shards: Sequence[Shard]) -> Iterator[tuple[str, str]]:
    """For each tensor, what it is and who writes it where, to be compared between ranks."""
    for shard in shards:
        for name, spec in shard.specs.items():
            yield name, f"{name!r} as {spec} into {shard.file}, by rank {shard.owner}"


class ShardFiles:
    """Writes tensors into the files that they belong to; each file is durable once it has all. A context manager.

    Args:
        directory: Where the files are made.
        shards: The files that this rank writes.
    """

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        self._directory = directory
        self._shards = {name: shard for shard in shards for name in shard.specs}
        self._left = {shard.file: len(shard.specs) for shard in shards}
        self._open: dict[str, TensorFileWriter] = {}
        self._empty = [shard for shard in shards if not shard.specs]

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, once."""
        shard = self._shards[name]
        if shard.file not in self._open:
            self._open[shard.file] = TensorFileWriter(self._directory / shard.file, shard.specs)
        writer = self._open.pop(shard.file)
        self._open[shard.file] = writer  # last, as the last used
        if len(self._open) > _MAX_OPEN:
            list(self._open.values())[-1 - _MAX_OPEN].rest()
        writer.write(name, tensor)
        self._left[shard.file] -= 1
        if not self._left[shard.file]:
            del self._open[shard.file]
            with writer:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for writer in self._open.values():
            writer.__exit__(kind, error, traceback)
        if error is None:
            for shard in self._empty:
                with TensorFileWriter(self._directory / shard.file, {}):
                    pass


def companions(directory: Path) -> list[Path]:
    """What lies beside the weights of a model and belongs to it: config, tokenizer, templates, code, license.

    These are the files whose suffix is one of .json, .txt, .model, .jinja, .py, .tiktoken, .vocab, .spm, .yaml and
    .yml, and LICENSE and NOTICE; without indexes of weights, the manifest of a job, hidden files and directories.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    return [
        path
        for path in sorted(directory.iterdir())
        if (path.suffix in _COPIED or path.stem in _COPIED_STEMS)
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and not (path.name == MANIFEST and job_directory(directory) is not None)
        and path.is_file()
    ]


def require_file_names(names: Sequence[str]) -> None:
    """Raises a ValueError that lists the names that are none of files within a directory, or that of our index."""
    wrong = [name for name in names if fault_of_file_name(name) is not None or name == INDEX]
    if wrong:
        raise ValueError(f"an extra file has a name of its own without directories, got {wrong!r}")
