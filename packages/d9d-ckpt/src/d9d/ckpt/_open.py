"""Opening whatever kind of checkpoint a path names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path

import attrs

from ._job_read import JobSource
from ._manifest import Manifest, job_directory
from ._source import CheckpointError, FileSource, Located, Source, locate


def open_checkpoint(path: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Source:
    """Opens a checkpoint in the Hugging Face layout, or a job checkpoint; only headers are read.

    Args:
        path: A `.safetensors` file, a `.safetensors.index.json`, or a directory with one index, or with files alone;
            or several of these, which are one checkpoint then; or the directory of one job checkpoint.

    Raises:
        FileNotFoundError: Nothing of the kind is there.
        CheckpointError: Files and index contradict each other, or several hold one name; all of it is listed.
        ValueError: A file, the index or the manifest is damaged.
    """
    if isinstance(path, (str, PathLike)):
        job = job_directory(Path(path))
        return FileSource(locate(Path(path))) if job is None else JobSource(job, Manifest.read(job))
    if not isinstance(path, Iterable):
        raise TypeError(f"a path or a list of paths is needed, got {path!r}")
    paths = list(map(Path, path))
    if not paths:
        raise ValueError("a checkpoint of no paths: name at least one")
    holders: dict[str, list[Located]] = {}
    for one in paths:
        if job_directory(one) is not None:
            raise ValueError(f"{str(one)!r} is a job checkpoint: open it alone, or convert it first")
        directory = one if one.is_dir() else one.parent
        for name, located in locate(one).items():
            holders.setdefault(name, []).append(attrs.evolve(located, file=str(directory / located.file)))
    problems = [
        f"{name!r} is in several files: {[one.file for one in found]}"
        for name, found in holders.items()
        if len(found) > 1
    ]
    if problems:
        raise CheckpointError([str(one) for one in paths], problems)
    return FileSource({name: found[0] for name, found in holders.items()})
