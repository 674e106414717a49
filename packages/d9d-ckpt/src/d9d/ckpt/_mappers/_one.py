"""Binding of leaves that make one tensor of one, for each assignment of the fields that both names share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import attrs

from .._mapper import Group, Mapper
from .._names import Pattern, matches


class OneToOne(Mapper, Protocol):
    """A leaf of one input and one output with the same fields."""

    @property
    def input(self) -> Pattern: ...
    @property
    def output(self) -> Pattern: ...


def bind_one(leaf: OneToOne, names: Collection[str]) -> Sequence[Group]:
    """The groups of such a leaf, which is an attrs class."""
    return [
        Group([one.input.name], [one.output.name], one)
        for one in (filled(leaf, values) for values in matches([leaf.input], names))
    ]


def filled(leaf: OneToOne, values: dict[str, str]) -> OneToOne:
    """The leaf with its fields filled in."""
    if not values:
        return leaf
    one: OneToOne = attrs.evolve(leaf, input=leaf.input.fill(values), output=leaf.output.fill(values))  # type: ignore[misc]  # a protocol cannot say attrs
    return one
