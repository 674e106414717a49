"""`ls`: the tensors of a checkpoint."""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._describe_bytes import describe_bytes
from .._dtypes import DTYPE_NAMES
from .._open import open_checkpoint
from .._source import Source
from ._exit_codes import FINE, FOUND
from ._output import Output, printable

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # it has no public name


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser("ls", help="list tensors", description="Lists tensors; reads headers only.")
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="only names like one of these: 'layers.*.weight'")
    parser.add_argument("--files", action="store_true", help="the files and what they hold, instead of tensors")
    parser.add_argument("--json", action="store_true", help="one JSON document, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs it; that nothing is like the globs is a finding."""
    source = open_checkpoint(arguments.path)
    names = matching(source, arguments.globs)
    if arguments.json:
        output.line(json.dumps(_document(source, names), indent=1))
    elif arguments.files:
        _list_files(source, names, output)
    else:
        rows = [
            [
                printable(name),
                _dtype(source, name),
                str(list(source[name].shape)),
                str(source[name].nbytes),
                source.file(name),
            ]
            for name in names
        ]
        output.table(["name", "dtype", "shape", "bytes", "file"], rows, right=["bytes"])
    if not arguments.json:
        output.line(_total(source, names))
    return FINE if names or not arguments.globs else FOUND


def matching(source: Source, globs: Collection[str]) -> list[str]:
    """The names that are like one of the globs, or one of them; all if there are none."""
    if not globs:
        return list(source)
    return [name for name in source if any(name == glob or fnmatch.fnmatchcase(name, glob) for glob in globs)]


def _total(source: Source, names: Collection[str]) -> str:
    files = len({source.file(name) for name in names})
    nbytes = sum(source[name].nbytes for name in names)
    return f"{len(names)} tensors, {describe_bytes(nbytes)} in {files} file(s)"


def _list_files(source: Source, names: Collection[str], output: Output) -> None:
    held: dict[str, list[str]] = {}
    for name in names:
        held.setdefault(source.file(name), []).append(name)
    rows = [
        [printable(file), str(len(some)), str(sum(source[name].nbytes for name in some))] for file, some in held.items()
    ]
    output.table(["file", "tensors", "bytes"], rows, right=["tensors", "bytes"])


def _document(source: Source, names: Collection[str]) -> dict[str, Any]:
    tensors = [
        {
            "name": name,
            "dtype": _dtype(source, name),
            "shape": list(source[name].shape),
            "bytes": source[name].nbytes,
            "file": source.file(name),
        }
        for name in names
    ]
    return {"tensors": tensors, "bytes": sum(source[name].nbytes for name in names)}


def _dtype(source: Source, name: str) -> str:
    return DTYPE_NAMES[source[name].dtype]
