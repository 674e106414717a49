"""Objects by import path."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, TypeGuard, runtime_checkable

from ._mapper import Mapper


@runtime_checkable
class _Checkable(Mapper, Protocol):
    """A mapper, by the names of its methods."""


def is_mapper(value: object) -> TypeGuard[Mapper]:
    """Whether something has the methods of a mapper; classes of mappers are none."""
    return isinstance(value, _Checkable) and not isinstance(value, type)


def import_path(path: str) -> Any:
    """The object that `module:name` stands for; the name may have dots.

    Raises:
        ValueError: There is none; the message says what failed.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ValueError(f"an import path is 'module:name', got {path!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does
        raise ValueError(f"{module_name!r} of {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ValueError(f"{path!r} names nothing: {error}") from error
    return found
