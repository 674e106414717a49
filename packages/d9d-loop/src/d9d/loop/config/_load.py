"""Defaults, then a TOML file, then the command line: the last one wins."""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ._help import help_text
from ._overrides import apply_override, parse_overrides
from ._problems import ConfigError, list_problems
from ._structure import strict_converter

T = TypeVar("T")


def load(cls: type[T], file: Path | None, overrides: Sequence[str]) -> T:
    """Fill a config class from a TOML file and command-line overrides.

    What neither of them gives keeps its default: within a nested class that is the default *instance* of the outer
    field, so ``--optimizer.lr 0.1`` changes one number of the optimizer that the outer class configured. Naming
    another ``kind`` drops that instance. A field that may be None is set to it by ``none``.

    Args:
        cls: An attrs class.
        file: A TOML file, or None.
        overrides: ``--a.b value`` or ``--a.b=value``; a value is a TOML literal, else a string.

    Raises:
        ConfigError: With all problems at once, each with the full path of its field.
    """
    table = {} if file is None else _read(file)
    for path, value in parse_overrides(overrides):
        apply_override(table, path, value)
    try:
        return strict_converter().structure(table, cls)
    except ExceptionGroup as error:
        raise ConfigError(list_problems(error)) from None


def from_command_line(cls: type[T], arguments: Sequence[str] | None = None, *, file: Path | None = None) -> T:
    """`load` for the top of a script: ``--config FILE`` names the file, ``--help`` shows all fields and exits.

    A problem is printed to stderr and ends the process with code 2.

    Args:
        cls: An attrs class.
        arguments: What the user wrote; None takes ``sys.argv[1:]``.
        file: The TOML file to read where ``--config`` names none.
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in rest or "-h" in rest:
        sys.stdout.write(help_text(cls))
        raise SystemExit(0)
    overrides: list[str] = []
    while rest:
        argument = rest.pop(0)
        if argument == "--config" and rest:
            file = Path(rest.pop(0))
        elif argument.startswith("--config="):
            file = Path(argument.removeprefix("--config="))
        else:
            overrides.append(argument)
    try:
        return load(cls, file, overrides)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n(--help lists all fields)\n")
        raise SystemExit(2) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"config file {str(file)!r} does not exist (looked from {str(Path.cwd())!r})"]) from None
    except OSError as error:
        raise ConfigError([f"config file {str(file)!r} cannot be read: {error.strerror}"]) from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError([f"config file {str(file)!r} is not TOML: {error}"]) from None
