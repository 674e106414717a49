"""Mappers written as TOML.

Steps follow each other; leaves of a step stand side by side. A kind is the name of a class in small letters with
underscores, or the import path of a leaf of your own; the other keys are the arguments of that class.

    [[step]]
    kind = "stack"
    input = "experts.{e}.weight"
    output = "experts.weight"
    count = 128
"""

from __future__ import annotations

import inspect
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from . import _mappers
from ._import_path import import_path, is_mapper
from ._mapper import Mapper
from ._names import quote_with_nearest
from ._toml_values import WrongValueError, as_type

_BUILT_IN = {name: vars(_mappers)[name] for name in _mappers.__all__}
KINDS: Mapping[str, type[Mapper]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): leaf for name, leaf in _BUILT_IN.items()
}
"""The classes that a kind without an import path may name."""


def mapper_from_toml(text: str) -> Mapper:
    """The mapper that a TOML document describes.

    Raises:
        ValueError: It is no TOML, or describes none; all faults are listed, each with the path of the key.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"not TOML: {error}") from error
    problems: list[str] = []
    problems += [f"{key} is no key here: a mapper is an array of tables [[step]]" for key in document if key != "step"]
    steps = _tables(document.get("step", []), "step", problems)
    if not steps and not problems:
        problems.append("it needs at least one [[step]]")
    mappers = [_step(step, path, problems) for path, step in steps]
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} problem(s):", *problems]))
    return _mappers.Sequential(*(mapper for mapper in mappers if mapper is not None))


def read_toml(path: Path) -> Mapper:
    """As `mapper_from_toml`, from a file.

    Raises:
        ValueError: It describes no mapper.
        OSError: It cannot be read.
    """
    try:
        return mapper_from_toml(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} describes no mapper: {error}") from error


def _step(table: Mapping[str, Any], path: str, problems: list[str]) -> Mapper | None:
    if "leaf" not in table:
        return _leaf(table, path, problems)
    problems += [
        f"{path}.{key} is no key of a step with leaves: put it into one of them" for key in table if key != "leaf"
    ]
    leaves = [_leaf(leaf, where, problems) for where, leaf in _tables(table["leaf"], f"{path}.leaf", problems)]
    return _mappers.Parallel(*(leaf for leaf in leaves if leaf is not None))


def _leaf(table: Mapping[str, Any], path: str, problems: list[str]) -> Mapper | None:
    before = len(problems)
    leaf = _class(table.get("kind"), path, problems)
    if leaf is None:
        return None
    parameters = inspect.signature(leaf).parameters
    types = typing.get_type_hints(leaf)
    given = {key: value for key, value in table.items() if key != "kind"}
    known = parameters.keys()
    for name in sorted(given.keys() - known):
        (quoted,) = quote_with_nearest([name], known)
        problems.append(f"{path}.{name} is no key of {table['kind']!r}: {quoted}, of {', '.join(known)}")
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name not in given:
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                problems.append(f"{path} is a {table['kind']!r} without {name!r}")
            continue
        value = _value(given[name], types.get(name, Any), f"{path}.{name}", problems)
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += value if isinstance(value, list | tuple) else [value]
        else:
            keywords[name] = value
    if len(problems) > before:
        return None
    try:
        made = leaf(*positional, **keywords)
    except (ValueError, TypeError) as error:
        problems.append(f"{path}: {error}")
        return None
    if not is_mapper(made):  # of a third party
        problems.append(f"{path}.kind is {table['kind']!r}, which lacks methods of a mapper")
    return made


def _class(kind: Any, path: str, problems: list[str]) -> type[Mapper] | None:
    if not isinstance(kind, str):
        problems.append(f"{path} needs a kind, a string, got {kind!r}")
    elif ":" in kind:
        try:
            found = import_path(kind)
        except ValueError as error:
            problems.append(f"{path}.kind: {error}")
            return None
        if isinstance(found, type) and attrs.has(found):
            return typing.cast("type[Mapper]", found)
        problems.append(f"{path}.kind is {kind!r}, which is no attrs class but {found!r}")
    elif kind not in KINDS:
        (name,) = quote_with_nearest([kind], KINDS)
        problems.append(
            f"{path}.kind is {name}, which is none of {', '.join(KINDS)}, nor an import path 'module:Class'"
        )
    else:
        return KINDS[kind]
    return None


def _value(value: Any, wanted: Any, path: str, problems: list[str]) -> Any:
    """`value` as what a field of type `wanted` takes; where that is mappers, tables are."""
    if wanted in (Mapper, Mapper | None):
        if isinstance(value, list):
            steps = [_step(table, where, problems) for where, table in _tables(value, path, problems)]
            return _mappers.Sequential(*(step for step in steps if step is not None))
        return _step(value, path, problems) if isinstance(value, dict) else _no_table(value, path, problems)
    if typing.get_origin(wanted) is tuple and Mapper in typing.get_args(wanted):
        return [_step(table, where, problems) for where, table in _tables(value, path, problems)]
    try:
        return as_type(value, wanted)
    except WrongValueError as error:
        problems.append(f"{path} {error}")
        return None


def _tables(value: Any, path: str, problems: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables of an array with their paths."""
    if not isinstance(value, list):
        _no_table(value, path, problems)
        return []
    for number, table in enumerate(value):
        if not isinstance(table, dict):
            _no_table(table, f"{path}[{number}]", problems)
    return [(f"{path}[{number}]", table) for number, table in enumerate(value) if isinstance(table, dict)]


def _no_table(value: object, path: str, problems: list[str]) -> None:
    key = re.sub(r"\[[0-9]+\]", "", path)
    problems.append(f"{path} should be a table with a kind, in an array [[{key}]], got {value!r}")
