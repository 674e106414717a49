"""Strict JSON from files that nobody vouches for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn


class Repeating(dict[str, Any]):
    """A JSON object in which keys come twice; it holds the last value of each."""

    repeated: tuple[str, ...] = ()


def parse_json(data: bytes, *, allow_nan: bool = False) -> Any:
    """Parses UTF-8 JSON.

    Objects with repeated keys come as `Repeating`, whole numbers of thousands of digits and -0 as floats. NaN and
    infinities, which Python writes and the standard lacks, are refused unless allowed.

    Raises:
        ValueError: It is not UTF-8, no JSON, or nested too deep.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        constants = float if allow_nan else _refuse
        return json.loads(text, object_pairs_hook=_object, parse_int=_whole, parse_constant=constants)
    except RecursionError:
        raise ValueError("it is no sound JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at character {error.pos}") from None


def repeated(value: object) -> tuple[str, ...]:
    """The keys that come twice in a parsed object."""
    return value.repeated if isinstance(value, Repeating) else ()


def is_text(value: object) -> bool:
    """Whether a parsed value is a string that can be written again: JSON can escape half of a character."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    counts = Counter(key for key, _ in pairs)
    found = Repeating(made)
    found.repeated = tuple(key for key, count in counts.items() if count > 1)
    return found


def _whole(digits: str) -> int | float:
    # int() refuses more digits
    return int(digits) if len(digits) <= 4000 and digits != "-0" else float(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it is no JSON: {constant}")
