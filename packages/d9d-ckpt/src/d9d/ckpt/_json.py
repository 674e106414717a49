"""Values that JSON gives back as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""None, bool, int, float, str, lists, and dicts with string keys."""
_MOST_BITS = 13_000
"""Of a whole number: below 4,000 digits, of which more are read as a float."""


def check_json(value: object, path: str) -> None:
    """Raises a TypeError that names the first thing below `path` that would not come back as it is."""
    if value is None or type(value) in (bool, float, str) or (type(value) is int and value.bit_length() <= _MOST_BITS):
        return
    if type(value) is list:
        for index, item in enumerate(value):
            check_json(item, f"{path}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{path} has the key {key!r}: JSON keeps keys as strings only")
            check_json(item, f"{path}[{key!r}]")
    else:
        raise TypeError(
            f"{path} is {_kind_of(value)}, which JSON does not give back as it is: "
            "make it None, bool, int, float, str, a list or a dict of these"
        )


def _kind_of(value: object) -> str:
    return f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
