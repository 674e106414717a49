"""Checkpoints to read from: named tensors of which any region can be read."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

from torch import Tensor

from ._files import TensorFile
from ._names import natural_key
from ._spec import Region, TensorSpec


class Source(Mapping[str, TensorSpec]):
    """A mapping from the names of a checkpoint to their specs, which can read what it names."""

    @abstractmethod
    def read(self, region: Region) -> Tensor:
        """The region, on the CPU. It may be mapped from a file: not to be written to."""

    def file(self, name: str) -> str:
        """Where a tensor is, for people: the name of its file, by default that of the source's class."""
        del name
        return type(self).__name__


class CheckpointError(ValueError):
    """A checkpoint contradicts itself. `problems` has one line for each thing wrong."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"{str(path)!r} has {len(problems)} problem(s):", *problems]))


class FileSource(Source):
    """Tensors in safetensors files; `files` maps each name to the one that holds it."""

    def __init__(self, files: Mapping[str, TensorFile]) -> None:
        self._files = {name: files[name] for name in sorted(files, key=natural_key)}

    def __getitem__(self, name: str) -> TensorSpec:
        return self._files[name].specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def file(self, name: str) -> str:
        """Name of the file that holds a tensor."""
        return self._files[name].path.name

    def read(self, region: Region) -> Tensor:
        """The region, mapped."""
        return self._files[region.name].tensor(region.name)[region.slices]


def open_checkpoint(path: str | PathLike[str]) -> Source:
    """Opens a checkpoint in the Hugging Face layout; only headers are read.

    Args:
        path: A `.safetensors` file, a `.safetensors.index.json`, or a directory with one index, or with files alone.

    Raises:
        FileNotFoundError: Nothing of the kind is there.
        CheckpointError: Files and index contradict each other; all contradictions are listed.
        ValueError: A file is damaged.
    """
    path = Path(path)
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise CheckpointError(path, [f"several indexes, open one: {[index.name for index in indexes]}"])
        if indexes:
            return _open_index(indexes[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no .safetensors file in {str(path)!r}")
        return _open_files(path, files, listed=None)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {str(path)!r}")
    return _open_index(path) if path.suffix == ".json" else _open_files(path, [path], listed=None)


def _open_index(path: Path) -> Source:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(listed.values()), key=natural_key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{str(path)!r} is no index: it needs a "weight_map" of file names ({error!r})') from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(path, [f"the index names a file outside its directory: {name!r}" for name in outside])
    return _open_files(path, [path.parent / name for name in names], listed=listed)


def _open_files(path: Path, paths: list[Path], *, listed: Mapping[str, str] | None) -> Source:
    problems = [f"the index names {file.name!r}, which is absent" for file in paths if not file.is_file()]
    opened = [TensorFile(file) for file in paths if file.is_file()]
    holders: dict[str, list[TensorFile]] = {}
    for file in opened:
        for name in file.specs:
            holders.setdefault(name, []).append(file)
    for name, files in holders.items():
        if len(files) > 1:
            problems.append(f"{name!r} is in several files: {[file.path.name for file in files]}")
    if listed is not None:
        present = {file.path.name: file for file in opened}
        problems += [
            f"{file.path.name!r} holds {name!r}, which the index {_instead(listed.get(name))}"
            for file in opened
            for name in file.specs
            if listed.get(name) != file.path.name and len(holders[name]) == 1
        ]
        problems += [
            f"the index has {name!r} in {file!r}, which lacks it"
            for name, file in listed.items()
            if file in present and name not in present[file].specs
        ]
    if problems:
        raise CheckpointError(path, problems)
    return FileSource({name: files[0] for name, files in holders.items()})


def _instead(file: str | None) -> str:
    return "lacks" if file is None else f"has in {file!r}"
