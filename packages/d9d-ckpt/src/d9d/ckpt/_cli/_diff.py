"""`diff`: how two checkpoints differ."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .._diff import TensorDifference, diff
from .._names import quote_with_nearest
from .._open import open_checkpoint
from ._exit_codes import FINE, FOUND
from ._output import Output, printable

if TYPE_CHECKING:
    from ._ls import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compares two checkpoints tensor by tensor. Without a tolerance, bit by bit; with one, an element "
        "differs unless |a - b| <= atol + rtol * |b|, where NaN equals NaN. Exits with 1 if they differ.",
    )
    parser.add_argument("left", type=Path, metavar="A")
    parser.add_argument("right", type=Path, metavar="B")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default: %(default)s)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default: %(default)s)")
    parser.add_argument("--promote", action="store_true", help="compare the values of other dtypes too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs it."""
    left, right = open_checkpoint(arguments.left), open_checkpoint(arguments.right)
    with output.progress("comparing") as progress:
        found = diff(
            left,
            right,
            rtol=arguments.rtol,
            atol=arguments.atol,
            promote=arguments.promote,
            progress=progress,
        )
    for title, names, others in (
        ("only in A", found.only_left, found.only_right),
        ("only in B", found.only_right, found.only_left),
    ):
        for name in quote_with_nearest(names, others):
            output.line(f"{title}: {name}")
    if found.tensors:
        columns = ["name", "A", "B", "differ", "beyond", "max abs", "max rel", "worst at"]
        output.table(columns, [_row(tensor) for tensor in found.tensors], right=columns[3:7])
    tolerated = sum(tensor.tolerated for tensor in found.tensors)
    within = f", {tolerated} differ within the tolerance" if tolerated else ""
    differing = len(found.tensors) - tolerated + len(found.only_left) + len(found.only_right)
    output.line(f"{found.equal} tensors are equal{within}, {differing} differ")
    return FINE if found.same else FOUND


def _row(tensor: TensorDifference) -> list[str]:
    values = ["-"] * 5
    if tensor.compared:
        values = [
            str(tensor.unequal),
            str(tensor.beyond),
            f"{tensor.max_abs:.3g}",
            f"{tensor.max_rel:.3g}",
            "-" if tensor.worst is None else str(list(tensor.worst)),
        ]
    return [printable(tensor.name), str(tensor.left), str(tensor.right), *values]
