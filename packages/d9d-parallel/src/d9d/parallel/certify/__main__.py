"""The certificate's command line."""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._certificate import CertificateError
from ._certify import certify
from ._meshes import every_mesh, parse_mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify, print the report; 0 if all layouts passed, else 1."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        meshes = [parse_mesh(text) for text in options.meshes]
        subject = _subject(options.subject)
    except ValueError as error:
        parser.error(str(error))
    for ranks in options.ranks:
        meshes += every_mesh(ranks)
    if not meshes:
        parser.error("there is no mesh: give --meshes or --ranks")
    choices: dict[str, Any] = {"dtype": getattr(torch, options.dtype)} if options.dtype else {}
    if options.rtol is not None:
        choices["rtol"] = options.rtol
    certificate = certify(**{**subject, **choices}, meshes=list(dict.fromkeys(meshes)))
    report = certificate.markdown() if options.markdown else str(certificate)
    sys.stdout.write(f"{report}\n")
    if options.parameters:
        sys.stdout.write(f"\n{certificate.parameters()}\n")
    try:
        certificate.check(allow_refused=options.allow_refused)
    except CertificateError:
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d9d.parallel.certify",
        description="Run layouts of a model on CPU ranks of this machine, and compare them with one process.",
    )
    parser.add_argument(
        "subject",
        metavar="module:factory",
        help="a function without arguments that returns the arguments of certify() in a dict, all but the meshes",
    )
    parser.add_argument(
        "--meshes", nargs="+", default=[], metavar="MESH", help="such as replicate=2,shard=2,expert=4, one or several"
    )
    parser.add_argument(
        "--ranks", nargs="+", default=[], type=int, metavar="N", help="every mesh of N ranks, also what is refused"
    )
    parser.add_argument("--dtype", choices=["float64", "float32"], help="instead of that of certify()")
    parser.add_argument("--rtol", type=float, help="largest relative error that passes")
    parser.add_argument("--allow-refused", action="store_true", help="exit with 0 also if meshes were refused")
    parser.add_argument("--parameters", action="store_true", help="print ratios and errors of every parameter")
    parser.add_argument("--markdown", action="store_true", help="print a table of layouts and verdicts in Markdown")
    return parser


def _subject(name: str) -> Mapping[str, Any]:
    module, _, factory = name.partition(":")
    if not factory:
        raise ValueError(f"{name!r} is not of the form module:factory")
    found = getattr(importlib.import_module(module), factory, None)
    if found is None:
        raise ValueError(f"module {module} has no {factory!r}")
    subject: Mapping[str, Any] = found()
    return subject


if __name__ == "__main__":
    sys.exit(main())
