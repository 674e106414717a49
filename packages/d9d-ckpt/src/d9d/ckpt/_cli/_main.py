"""Parsing the command line, running a command, and what its end means to the shell."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from .._collective import PeerError
from .._problems import PlanError
from . import _convert, _diff, _ls, _plan, _show, _verify
from ._exit_codes import BROKEN_PIPE, FOUND, INTERRUPTED, USAGE
from ._output import make_output

_COMMANDS = (_ls, _show, _diff, _verify, _plan, _convert)
_EPILOG = """\
exit codes: 0 all is well; 1 differences or problems were found; 2 wrong usage, or what cannot be read or written.
PATH is a .safetensors file, an index, a directory with them, or the directory of a job checkpoint.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of this process, and returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may have characters that a terminal lacks
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as error:  # argparse has said why
        return error.code if isinstance(error.code, int) else USAGE
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.run(arguments, make_output(plain=arguments.plain))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        if isinstance(sys.stdout, io.TextIOWrapper):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        # what all ranks raise, the first one says
        if not isinstance(error, (PeerError, PlanError)) or os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"d9d-ckpt: {str(error) or type(error).__name__}\n")
        return FOUND if isinstance(error, PlanError) else USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="d9d-ckpt",
        description="Looks into checkpoints, compares, verifies and converts them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plain", action="store_true", help="plain text on a terminal too")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
