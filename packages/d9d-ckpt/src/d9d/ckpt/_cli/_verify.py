"""`verify`: all that is wrong with a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .._verify import verify
from ._exit_codes import FINE, FOUND
from ._output import Output

if TYPE_CHECKING:
    from ._ls import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "verify",
        help="look for faults",
        description="Looks for all faults of a checkpoint: truncated, overlapping, duplicate, missing, aliased and so "
        "on. Reads headers only, of a job checkpoint all data for its checksums. Exits with 1 if there are any.",
    )
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--values", action="store_true", help="read all data to find NaN and infinities")
    parser.add_argument("--contents", action="store_true", help="read all data to note tensors of equal content")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs it."""
    report = verify(arguments.path, values=arguments.values, contents=arguments.contents)
    output.line(str(report))
    return FINE if report.sound else FOUND
