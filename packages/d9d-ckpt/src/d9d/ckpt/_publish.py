"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import ProcessGroup

from ._collective import rank_of, together
from ._files import sync_directory

PARTIAL = ".partial"
"""Suffix of a directory that is being written."""


@contextmanager
def published(directory: Path, group: ProcessGroup | None) -> Generator[Path]:
    """A hidden sibling to write into, which takes the name `directory` when the block ends. Collective.

    All ranks must see one file system. The block must make its files durable, and must raise on all ranks or none.
    After an error, or a kill at any moment, `directory` does not exist; remains of an earlier try are removed.

    Raises:
        FileExistsError: `directory` exists.
    """
    with together(group):
        if rank_of(group) == 0 and (directory.exists() or directory.is_symlink()):  # though it lead nowhere
            raise FileExistsError(f"{str(directory)!r} exists: remove it or choose another name")
    partial = directory.with_name(f".{directory.name}{PARTIAL}")
    with together(group):
        if rank_of(group) == 0:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
    try:
        yield partial
        with together(group):
            if rank_of(group) == 0:
                sync_directory(partial)
                os.rename(partial, directory)  # noqa: PTH104  # Path.rename is the same call; this one says what it is
                sync_directory(directory.parent)
    except Exception:
        if rank_of(group) == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
