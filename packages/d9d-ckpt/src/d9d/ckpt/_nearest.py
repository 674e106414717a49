"""The most similar of many names."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Collection, Iterator

from ._name_index import Names

_EXHAUSTIVE = 20_000
"""Comparisons up to which every name is compared with every candidate: about a second."""
_NEIGHBOURS = 8
_SIBLINGS = 300
"""Names that differ from one in the same part, of which the most similar are looked for."""


class Nearest:
    """Finds for a name the candidate that is most like it.

    Among many candidates it compares only those that differ in one part between dots, and those that share the longest
    beginning or end, which is what a typo, or a wrong prefix or suffix, leaves.
    """

    def __init__(self, candidates: Collection[str], *, lookups: int) -> None:
        self._candidates = candidates
        self._few = lookups * len(candidates) <= _EXHAUSTIVE
        self._names = Names() if self._few else Names(candidates)
        self._forward = [] if self._few else sorted(candidates)
        self._backward = [] if self._few else sorted(name[::-1] for name in candidates)

    def find(self, name: str) -> str | None:
        """The most similar candidate; None if none is similar."""
        shortlist = self._candidates if self._few else list(dict.fromkeys(self._shortlist(name)))
        found = difflib.get_close_matches(name, shortlist, n=1)
        return found[0] if found else None

    def _shortlist(self, name: str) -> Iterator[str]:
        parts = name.split(".")
        for index in range(len(parts)):
            others = list(self._names.candidates([*parts[:index], None, *parts[index + 1 :]]))
            yield from difflib.get_close_matches(name, others[:_SIBLINGS], n=_NEIGHBOURS)
        yield from _around(self._forward, name)
        yield from (found[::-1] for found in _around(self._backward, name[::-1]))


def _around(ordered: list[str], name: str) -> list[str]:
    position = bisect.bisect(ordered, name)
    return ordered[max(0, position - _NEIGHBOURS) : position + _NEIGHBOURS]
