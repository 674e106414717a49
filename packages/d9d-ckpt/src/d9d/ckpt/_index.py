"""Indexes of checkpoints in several files: which file holds which tensor."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ._findings import FileError, Problem, ProblemKind
from ._names import natural_key
from ._parse_json import is_text, parse_json, repeated

MAX_INDEX_BYTES = 1 << 30
"""Longer indexes are refused: one line for a tensor makes a million of them 100 MB."""


@attrs.frozen
class Index:
    """What an index says."""

    weight_map: Mapping[str, str]
    """The file name of each tensor: a plain name in the directory of the index."""
    metadata: Mapping[str, Any]
    """Such as `total_size`, the bytes of all tensors. Not checked."""

    unsound: frozenset[str] = frozenset()
    """Tensors whose files are no names; `weight_map` is without them."""

    @property
    def files(self) -> list[str]:
        """Names of all files, in natural order."""
        return sorted(set(self.weight_map.values()), key=natural_key)


def read_index(path: Path) -> Index:
    """Reads and checks an index; the files that it names are not looked at.

    Raises:
        ValueError: It is no sound index, or names files outside of its directory; all that is wrong is listed.
        OSError: It cannot be read.
    """
    index, problems = inspect_index(path)
    if problems:
        raise FileError(path, "no index", problems)
    return index


def inspect_index(path: Path) -> tuple[Index, list[Problem]]:
    """As `read_index`, but returns the problems, and of the index what is sound.

    Raises:
        OSError: It cannot be read.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        return Index({}, {}), [_malformed("it is no regular file")]
    if found.st_size > MAX_INDEX_BYTES:
        return Index({}, {}), [_malformed(f"it has {found.st_size} bytes, of which at most {MAX_INDEX_BYTES} are read")]
    try:
        document = parse_json(path.read_bytes())
    except ValueError as error:
        return Index({}, {}), [_malformed(str(error))]
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict) or not listed:  # nothing at all is a broken export, not a checkpoint
        return Index({}, {}), [_malformed('it needs a "weight_map" from names of tensors to names of files')]
    problems = [
        Problem(ProblemKind.DUPLICATE, f"the index has {key!r} more than once")
        for key in (*repeated(document), *repeated(listed))
    ]
    problems += [_malformed(f"the name {name!r} is no text") for name in listed if not is_text(name)]
    weight_map = {name: file for name, file in listed.items() if is_text(name)}
    unsound = {file: fault for file in _distinct(weight_map.values()) if (fault := fault_of_file_name(file))}
    problems += unsound.values()
    problems += [
        _malformed(f"the index has {name!r} in {file!r}, which is no name of a file")
        for name, file in weight_map.items()
        if not isinstance(file, str)
    ]
    metadata = document.get("metadata")
    sound = {name: file for name, file in weight_map.items() if isinstance(file, str) and file not in unsound}
    return Index(sound, metadata if isinstance(metadata, dict) else {}, frozenset(weight_map.keys() - sound)), problems


def fault_of_file_name(name: str) -> Problem | None:
    """What is wrong with a file name from a file that nobody vouches for; it must be a plain name.

    A link of such a name may lead anywhere: caches are made of links, and who can make one can read its target.
    """
    if not is_text(name) or not name or "\0" in name or len(name.encode()) > 255:
        return _malformed(f"{name!r} is no name of a file")
    if name in (".", "..") or "/" in name or "\\" in name:
        return Problem(ProblemKind.OUTSIDE, f"a file outside the directory is named: {name!r}")
    return None


def _distinct(values: Any) -> list[str]:
    return list(dict.fromkeys(value for value in values if isinstance(value, str)))


def _malformed(text: str) -> Problem:
    return Problem(ProblemKind.MALFORMED, text)
