"""Where a checkpoint on the command line lies."""

from __future__ import annotations

from pathlib import Path


def directory_of(path: Path) -> Path:
    """The directory that a checkpoint lies in."""
    return path if path.is_dir() else path.parent
