"""Checkpoints to read from: named tensors of which any region can be read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from ._cross_check import absent_files, contradictions, duplicates, gaps_in_numbers
from ._extent import Block, Extent
from ._findings import Problem
from ._hands import Fill
from ._header import Header, read_header
from ._index import Index, read_index
from ._manifest import not_found
from ._names import natural_key
from ._spec import Region, TensorSpec
from ._stream import read_now


class Source(Mapping[str, TensorSpec]):
    """A mapping from the names of a checkpoint to their specs, which can read what it names.

    Tensors that lie elsewhere than in files are a class of yours with `read` and the methods of a mapping; it is asked
    by one thread, for one region after the other.
    """

    @abstractmethod
    def read(self, region: Region) -> Tensor:
        """The region, on the CPU. It may share memory with the source: not to be written to.

        Raises:
            OSError: It cannot be read.
            ValueError: It is not within the tensor.
        """

    def extents(self, region: Region) -> Sequence[Extent] | None:
        """Where the bytes of a region lie in files, for several threads to read; None where `read` must be asked."""
        del region
        return None

    def file(self, name: str) -> str:
        """Where a tensor is, for people: the name of its file, by default that of the source's class."""
        del name
        return type(self).__name__


class CheckpointError(ValueError):
    """A checkpoint contradicts itself. `problems` has one line for each thing wrong."""

    def __init__(self, path: str | Sequence[str], problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"{path!r} has {len(problems)} problem(s):", *problems]))


@attrs.frozen
class Located:
    """A tensor in a file, and what the file is called."""

    file: str
    block: Block


class FileSource(Source):
    """Tensors in safetensors files, in natural order of their names."""

    def __init__(self, located: Mapping[str, Located]) -> None:
        self._located = {name: located[name] for name in sorted(located, key=natural_key)}

    def __getitem__(self, name: str) -> TensorSpec:
        return self._located[name].block.spec

    def __iter__(self) -> Iterator[str]:
        return iter(self._located)

    def __len__(self) -> int:
        return len(self._located)

    def file(self, name: str) -> str:
        return self._located[name].file

    def extents(self, region: Region) -> Sequence[Extent]:
        whole = tuple(slice(0, length) for length in region.shape)
        return [Extent(self._located[region.name].block, region, whole)]

    def read(self, region: Region) -> Tensor:
        return read_extents(region, self[region.name], self.extents(region))


def read_extents(region: Region, spec: TensorSpec, extents: Sequence[Extent]) -> Tensor:
    """The region of a tensor, put together from where it lies.

    Raises:
        ValueError: It is not within the tensor.
    """
    if not region.is_within(spec):
        raise ValueError(f"{region} is not within {region.name!r}, which is {spec}")
    values = torch.empty(region.shape, dtype=spec.dtype)
    read_now(Fill(extent, values[extent.index]) for extent in extents)
    return values


def locate(path: Path) -> Mapping[str, Located]:
    """The tensors of a file, an index or a directory.

    Raises:
        FileNotFoundError: Nothing of the kind is there.
        CheckpointError: Files and index contradict each other.
        ValueError: A file or the index is damaged.
    """
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise CheckpointError(str(path), [f"several indexes, open one: {[index.name for index in indexes]}"])
        if indexes:
            return _open_index(indexes[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise not_found(path)
        return _open_files(path, files, gaps_in_numbers(file.name for file in files))
    if not path.is_file():
        raise not_found(path)
    return _open_index(path) if path.suffix == ".json" else _open_files(path, [path])


def _open_index(path: Path) -> Mapping[str, Located]:
    index = read_index(path)
    files = [path.parent / name for name in index.files]
    present = [file for file in files if file.is_file()]
    absent = absent_files(index, {file.name for file in present})
    return _open_files(path, present, absent, index)


def _open_files(
    path: Path, files: Iterable[Path], problems: Iterable[Problem] = (), index: Index | None = None
) -> Mapping[str, Located]:
    """The tensors of files in one directory, unless there are `problems` with them, or between them and the index."""
    headers = {file.name: read_header(file) for file in files}
    problems = [*problems, *duplicates(headers), *(contradictions(index, headers) if index is not None else ())]
    if problems:
        raise CheckpointError(str(path), [problem.text for problem in problems])
    directory = path if path.is_dir() else path.parent
    return {
        name: located for file, header in headers.items() for name, located in _locate(directory / file, header).items()
    }


def _locate(file: Path, header: Header) -> Mapping[str, Located]:
    return {
        name: Located(file.name, Block(file, header.nbytes, entry.start, entry.spec))
        for name, entry in header.entries.items()
    }
