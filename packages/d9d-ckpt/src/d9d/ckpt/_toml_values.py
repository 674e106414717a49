"""Values of TOML as what the fields of leaves take: no value is bent into another type."""

from __future__ import annotations

import collections.abc
import types
import typing
from typing import Any

import torch

from ._dtypes import DTYPE_NAMES
from ._import_path import import_path
from ._names import Pattern, quote_with_nearest

_SCALARS: dict[Any, tuple[type, str]] = {
    str: (str, "a string"),
    Pattern: (str, "a string"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}


class WrongValueError(ValueError):
    """A value is not of the type that is wanted; the message goes on after the path of the key."""


def as_type(value: Any, wanted: Any) -> Any:
    """`value` as a field of type `wanted` takes it.

    Names and patterns are strings, dtypes their names in torch, functions import paths, tuples arrays.

    Raises:
        WrongValueError: It is of another type.
    """
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return _as_any_of(value, [argument for argument in arguments if argument is not type(None)])
    if origin in (tuple, list, collections.abc.Sequence, collections.abc.Collection):
        if not isinstance(value, list):
            raise WrongValueError(f"should be an array, got {value!r}")
        return _items(value, origin, arguments)
    if origin is collections.abc.Callable:
        return _imported(_exactly(value, str, "an import path 'module:name'"))
    if wanted is torch.dtype:
        return dtype_of(_exactly(value, str, "the name of a dtype"))
    if wanted is float and type(value) is int:
        return float(value)
    return _exactly(value, *_SCALARS[wanted]) if wanted in _SCALARS else value


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls `name`, of those that checkpoints hold.

    Raises:
        WrongValueError: There is none.
    """
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
    if name not in known:
        (quoted,) = quote_with_nearest([name], known)
        raise WrongValueError(f"should be one of {', '.join(known)}, got {quoted}")
    return known[name]


def _items(values: list[Any], origin: Any, wanted: tuple[Any, ...]) -> tuple[Any, ...]:
    if origin is not tuple or Ellipsis in wanted or not wanted:
        wanted = wanted[:1] * len(values) or (Any,) * len(values)
    if len(values) != len(wanted):
        raise WrongValueError(f"should be an array of {len(wanted)}, got {values!r}")
    return tuple(as_type(item, each) for item, each in zip(values, wanted))


def _as_any_of(value: Any, wanted: list[Any]) -> Any:
    errors = []
    for candidate in wanted:
        try:
            return as_type(value, candidate)
        except WrongValueError as error:
            errors.append(str(error))
    raise WrongValueError(", or ".join(errors))


def _exactly(value: Any, wanted: type, name: str) -> Any:
    if type(value) is not wanted:  # True is no int
        raise WrongValueError(f"should be {name}, got {value!r}")
    return value


def _imported(path: str) -> Any:
    try:
        return import_path(path)
    except ValueError as error:
        raise WrongValueError(f"is no function: {error}") from error
