"""`plan`: what a mapper makes of a checkpoint, without reading its data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .._open import open_checkpoint
from .._plan import plan
from ._exit_codes import FINE
from ._mapper_arguments import add_mapper_arguments, mapper_of, target_of
from ._output import Output

if TYPE_CHECKING:
    from ._ls import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="prove what a mapper makes",
        description="Proves from headers alone that a mapper uses all of a checkpoint and makes each tensor once, and "
        "shows what it makes of what. Exits with 1 and all problems if it does not.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    add_mapper_arguments(parser)
    parser.add_argument(
        "--target",
        metavar="MODULE:NAME|PATH",
        help="what there shall be: a checkpoint, or a module, its state dict, specs or a function that makes them",
    )
    parser.add_argument(
        "--explain", action="append", default=[], metavar="NAME", help="where one tensor comes from; may be repeated"
    )
    parser.add_argument("--mermaid", metavar="FILE", help="write the graph as Mermaid; - is stdout")
    parser.add_argument("--svg", metavar="FILE", help="write the graph as SVG; - is stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs it."""
    source, mapper = open_checkpoint(arguments.source), mapper_of(arguments)
    target = None if arguments.target is None else target_of(arguments.target)
    planned = plan(source, mapper, target, waive=arguments.waive)
    for name in arguments.explain:
        output.line(planned.explain(name))
    if arguments.mermaid is not None:
        _write(arguments.mermaid, planned.mermaid())
    if arguments.svg is not None:
        _write(arguments.svg, planned.svg())
    if not arguments.explain and "-" not in (arguments.mermaid, arguments.svg):
        output.line(str(planned))
    return FINE


def _write(file: str, text: str) -> None:
    if file == "-":
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    else:
        Path(file).write_text(text, encoding="utf-8")
