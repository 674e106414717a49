"""The natural order of names."""

from __future__ import annotations

import re
from typing import Any

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> tuple[list[Any], str]:
    """Sorts digits by value: `layers.2` before `layers.10`."""
    parts: list[Any] = _DIGITS.split(name)  # text and digits take turns, text first
    parts[1::2] = [int(digits[:4000]) for digits in parts[1::2]]  # Python refuses to convert more than 4,300
    return parts, name
