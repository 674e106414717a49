"""What a mapper is called in tables, trees and pictures."""

from __future__ import annotations

from typing import Any

import attrs

from ._mapper import Group, Mapper
from ._mappers._chain import Chain
from ._mappers._scope import Prefix
from ._names import Pattern


def leaf_of(mapper: Mapper) -> Mapper:
    """The mapper within prefixes."""
    while isinstance(mapper, Prefix):
        mapper = mapper.mapper
    return mapper


def kinds(group: Group) -> tuple[str, ...]:
    """Names of the leaves' classes, in the order of their steps, without repetitions in a row."""
    mapper = leaf_of(group.mapper)
    if not isinstance(mapper, Chain):
        return (type(mapper).__name__,)
    found: list[str] = []
    for step in mapper.steps:
        for kind in dict.fromkeys(kind for each in step for kind in kinds(each)):
            if found[-1:] != [kind]:
                found.append(kind)
    return tuple(found)


def describe(mapper: Mapper) -> str:
    """The class of a leaf and its arguments, without names of tensors and what is as by default."""
    leaf = leaf_of(mapper)
    kind = type(leaf)
    if not attrs.has(kind):
        return kind.__name__
    arguments = []
    for field in attrs.fields(kind):
        value: Any = getattr(leaf, field.name)
        names = isinstance(value, Pattern) or (isinstance(value, tuple) and any(isinstance(v, Pattern) for v in value))
        if field.init and field.repr and not names and value not in (field.default, ()):
            text = field.repr(value) if callable(field.repr) else repr(value)
            arguments.append(f"{field.name}={text.removeprefix('torch.')}")
    return f"{kind.__name__}({', '.join(arguments)})" if arguments else kind.__name__
