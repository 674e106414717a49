"""Opening what a path on the command line names."""

from __future__ import annotations

from pathlib import Path

from .._job_read import JobCheckpoint
from .._manifest import MANIFEST, is_job_directory
from .._source import Source, open_checkpoint


def open_source(path: Path) -> Source:
    """The tensors of a checkpoint of either kind."""
    directory = path.parent if path.name == MANIFEST else path
    if is_job_directory(directory):
        return JobCheckpoint(directory).source
    try:
        return open_checkpoint(path)
    except FileNotFoundError as error:
        steps = sorted(found.name for found in path.glob("step-*") if is_job_directory(found))
        if not steps:
            raise
        text = f"{str(path)!r} has {len(steps)} job checkpoint(s): name one, such as {str(path / steps[-1])!r}"
        raise FileNotFoundError(text) from error


def directory_of(path: Path) -> Path:
    """The directory that a checkpoint lies in."""
    return path if path.is_dir() else path.parent
