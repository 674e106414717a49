"""`show`: what is known of some tensors, their values included."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .._describe_bytes import describe_bytes
from .._dtypes import DTYPE_NAMES
from .._header import read_header
from .._manifest import Manifest, job_directory
from .._names import quote_with_nearest
from .._open import open_checkpoint
from .._source import Source
from .._tiles import tiles
from ._directory import directory_of
from ._exit_codes import FINE
from ._ls import matching
from ._output import Output, printable
from ._statistics import statistics_of

if TYPE_CHECKING:
    from ._ls import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "show", help="show tensors", description="Shows where tensors lie, their statistics and first values."
    )
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a name or a glob")
    parser.add_argument("--values", type=int, default=8, metavar="N", help="how many values (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs it."""
    source = open_checkpoint(arguments.path)
    unknown = [name for name in arguments.names if not matching(source, [name])]
    if unknown:
        raise ValueError(f"no tensor is called {', '.join(quote_with_nearest(unknown, source.keys()))}")
    for name in matching(source, arguments.names):
        spec = source[name]
        output.line(printable(name))
        output.line(f"  dtype   {DTYPE_NAMES[spec.dtype]}")
        output.line(f"  shape   {list(spec.shape)}")
        output.line(f"  bytes   {spec.nbytes} ({describe_bytes(spec.nbytes)})")
        for place in _places(arguments.path, source, name):
            output.line(f"  in      {place}")
        for label, value in statistics_of(source, name):
            output.line(f"  {label:<7} {value}")
        if arguments.values > 0:
            output.line(f"  values  {_first_values(source, name, arguments.values)}")
    return FINE


def _places(path: Path, source: Source, name: str) -> Iterator[str]:
    """Where the bytes of a tensor are."""
    directory = directory_of(path)
    if job_directory(path) is not None:
        for stored in Manifest.read(directory).stored[name]:
            stops = [start + length for start, length in zip(stored.region.offset, stored.region.shape)]
            entry = read_header(directory / stored.file).entries[stored.key]
            yield (
                f"{stored.file} [{entry.start}, {entry.stop}), elements {list(stored.region.offset)} to {stops}, "
                f"crc32 {stored.crc32:#010x}"
            )
    else:
        entry = read_header(directory / source.file(name)).entries[name]
        yield f"{source.file(name)} [{entry.start}, {entry.stop})"


def _first_values(source: Source, name: str, count: int) -> str:
    spec = source[name]
    first = next(iter(tiles(name, spec, count)), None)
    values = [] if first is None else source.read(first).reshape(-1)[:count].tolist()
    more = ", ..." if len(values) < spec.numel else ""
    return f"[{', '.join(f'{value:.6g}' if isinstance(value, float) else str(value) for value in values)}{more}]"
