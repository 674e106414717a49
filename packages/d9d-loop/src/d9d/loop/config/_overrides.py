"""``--a.b value`` and ``--a.b=value``: values as TOML literals, else strings."""

import tomllib
from collections.abc import Sequence
from typing import Any

from ._problems import ConfigError


def parse_overrides(arguments: Sequence[str]) -> list[tuple[tuple[str, ...], Any]]:
    """Paths and values of command-line arguments, in their order.

    Raises:
        ConfigError: If an argument does not start with ``--``, or has no value.
    """
    overrides: list[tuple[tuple[str, ...], Any]] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not all(name.split(".")):
            problems.append(f"{argument!r} is not an override; write --path.of.field value")
        elif equals:
            overrides.append((tuple(name.split(".")), _parse_value(text)))
        elif rest and not rest[0].startswith("--"):
            overrides.append((tuple(name.split(".")), _parse_value(rest.pop(0))))
        else:
            problems.append(f"{argument} has no value; write {argument} value")
    if problems:
        raise ConfigError(problems)
    return overrides


def apply_override(table: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set one value in nested tables; a table is merged into one that is there.

    Raises:
        ConfigError: If the path leads through something that is no table.
    """
    for depth, name in enumerate(path[:-1], start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError([f"{'.'.join(path[:depth])}: set to {table!r}, so it has no {'.'.join(path[depth:])!r}"])
    if isinstance(value, dict) and isinstance(table.get(path[-1]), dict):
        for name, inner in value.items():
            apply_override(table[path[-1]], (name,), inner)
    else:
        table[path[-1]] = value


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
