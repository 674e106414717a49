"""Looking for all that is wrong with a checkpoint, instead of the first thing."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ._manifest import job_directory
from ._report import Report
from ._verify_files import verify_files
from ._verify_job import verify_job


def verify(path: str | PathLike[str], *, values: bool = False, contents: bool = False) -> Report:
    """Looks for everything that is wrong with a checkpoint, whatever it is; nothing of it is changed.

    Of a model checkpoint headers and index alone are read, unless asked for more. The data of a job checkpoint is
    compared with its checksums.

    Args:
        path: A `.safetensors` file, an index, or a directory of a model checkpoint or a job checkpoint.
        values: Whether to read all data to count values that are not finite: a problem.
        contents: Whether to read all data to find tensors of equal content under several names: a note.

    Raises:
        FileNotFoundError: There is no checkpoint.
    """
    path = Path(path)
    job = job_directory(path)
    if job is not None:
        return verify_job(job, values=values, contents=contents)
    return verify_files(path, values=values, contents=contents)
