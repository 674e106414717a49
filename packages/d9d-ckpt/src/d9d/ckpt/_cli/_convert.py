"""`convert`: writing what a mapper makes of a checkpoint."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .._collective import rank_of
from .._convert import convert
from .._describe_bytes import describe_bytes
from .._open import open_checkpoint
from .._toml_values import WrongValueError, dtype_of
from ._directory import directory_of
from ._exit_codes import FINE
from ._mapper_arguments import add_mapper_arguments, mapper_of, target_of
from ._output import Output

if TYPE_CHECKING:
    from ._ls import Subparsers

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kMGT", start=1)
    for suffix, base in (("B", 1000), ("", 1000), ("iB", 1024))
}


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in another form",
        description="Streams a checkpoint through a mapper into a new directory in the Hugging Face layout. "
        "Under torchrun each process writes files of its own.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("out", type=Path, metavar="OUT", help="a directory that does not exist")
    add_mapper_arguments(parser)
    parser.add_argument("--target", metavar="MODULE:NAME|PATH", help="what there shall be; see plan")
    parser.add_argument("--dtype", type=_dtype, help="of floating tensors, such as bfloat16")
    parser.add_argument("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="(default: %(default)s)")
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="most memory for what is being read")
    parser.add_argument("--copy-files", action="store_true", help="copy config and tokenizer files too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs it."""
    mapper = mapper_of(arguments)
    target = None if arguments.target is None else target_of(arguments.target)
    with _world():
        first = rank_of(None) == 0
        with output.progress("converting") if first else nullcontext() as progress:
            convert(
                open_checkpoint(arguments.source),
                mapper,
                arguments.out,
                target=target,
                waive=arguments.waive,
                dtype=arguments.dtype,
                max_shard_bytes=arguments.max_shard_size,
                copy_from=directory_of(arguments.source) if arguments.copy_files else None,
                progress=progress,
                **({} if arguments.memory is None else {"memory_budget": arguments.memory}),
            )
        if first:
            written = open_checkpoint(arguments.out)
            nbytes = sum(spec.nbytes for spec in written.values())
            files = len({written.file(name) for name in written})
            output.line(f"{arguments.out}: {len(written)} tensors, {describe_bytes(nbytes)} in {files} file(s)")
    return FINE


@contextmanager
def _world() -> Generator[None]:
    """A process group over the processes that torchrun started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _dtype(text: str) -> torch.dtype:
    try:
        return dtype_of(text)
    except WrongValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise argparse.ArgumentTypeError(f"a size is a number and a unit such as 5GB or 512MiB, got {text!r}")
    size = int(float(found[1]) * units[found[2].lower()])
    if size < 1:
        raise argparse.ArgumentTypeError(f"a size is at least one byte, got {text!r}")
    return size
