"""Values that JSON gives back as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""None, bool, int, float, str, lists, and dicts with string keys."""


def check_json(value: object, path: str) -> None:
    """Raises a TypeError that names the first thing below `path` that would not come back as it is."""
    if value is None or type(value) in (bool, int, float, str):
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
            f"{path} is a {type(value).__name__}, which JSON does not give back as it is: "
            "make it None, bool, int, float, str, a list or a dict of these"
        )
