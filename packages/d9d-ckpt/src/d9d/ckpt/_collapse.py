"""Writing many names as one: `layers.{0..59}.weight`."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

Skeleton = tuple[str | None, ...]
_LISTED = 4


def skeleton(name: str) -> Skeleton:
    """The parts between dots, None for numbers: what names of different layers have in common."""
    return tuple(None if part.isdecimal() else part for part in name.split("."))


@attrs.define
class Collapsed:
    """Names of one skeleton."""

    parts: Skeleton
    numbers: list[set[int]]
    count: int = 0

    @classmethod
    def like(cls, name: str) -> Collapsed:
        """An empty collection for names such as this."""
        parts = skeleton(name)
        return cls(parts, [set() for part in parts if part is None])

    def add(self, name: str) -> None:
        """Adds a name of the same skeleton."""
        for seen, number in zip(self.numbers, (part for part in name.split(".") if part.isdecimal())):
            seen.add(int(number[:4000]))
        self.count += 1

    def __str__(self) -> str:
        numbers = iter(self.numbers)
        return ".".join(_ranges(next(numbers)) if part is None else part for part in self.parts)


def collapse(names: Iterable[str]) -> list[str]:
    """The names, those that differ in numbers alone as one, in order of first appearance."""
    found: dict[Skeleton, Collapsed] = {}
    for name in names:
        found.setdefault(skeleton(name), Collapsed.like(name)).add(name)
    return list(map(str, found.values()))


def _ranges(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    listed = ordered if len(ordered) <= _LISTED else [*ordered[: _LISTED - 1], "…", ordered[-1]]
    return f"{{{','.join(map(str, listed))}}}"
