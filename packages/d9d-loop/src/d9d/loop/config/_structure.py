"""The strict converter: nothing is coerced but an int to a float, a str to a Path and a list to a tuple."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import mapping_structure_factory
from cattrs.errors import AttributeValidationNote, IterableValidationNote
from cattrs.gen import make_dict_structure_fn

from ._defaults import with_defaults
from ._problems import nearest
from ._tagged import is_union_root, kind_of

Hook = Callable[[Any, Any], Any]

NONE = "none"
"""How a TOML file or a command line, which have no null, says None for an optional field."""


def is_union(cls: Any) -> bool:
    """Whether a type is ``A | B``, or ``A | None``."""
    return get_origin(cls) in {Union, UnionType}


def describe(cls: Any) -> str:
    """A type as a user of the command line sees it."""
    members: tuple[Any, ...] = get_args(cls)
    if _is_literal(cls):
        return " | ".join(map(repr, members))
    if is_union(cls):
        return " | ".join(NONE if member is NoneType else describe(member) for member in members)
    if _is_sequence(cls):
        return f"[{', '.join('...' if member is Ellipsis else describe(member) for member in members)}]"
    return cls.__name__ if isinstance(cls, type) and not members else str(cls)


def strict_converter() -> cattrs.Converter:
    """A converter with the rules of this module; it reports all problems at once."""
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    for scalar in (bool, int, float, str, Path):
        converter.register_structure_hook(scalar, _structure_scalar)
    converter.register_structure_hook_func(_is_literal, _structure_literal)
    converter.register_structure_hook_factory(_is_sequence, _sequence_hook(converter))
    converter.register_structure_hook_factory(_is_table, _table_hook(converter))
    converter.register_structure_hook_factory(is_union, _union_hook(converter))
    converter.register_structure_hook_factory(attrs.has, _class_hook(converter))
    converter.register_structure_hook_factory(is_union_root, _tagged_hook(converter))
    return converter


def _is_literal(cls: Any) -> bool:
    return get_origin(cls) is Literal


def _is_sequence(cls: Any) -> bool:
    return get_origin(cls) in {list, tuple}


def _is_table(cls: Any) -> bool:
    return get_origin(cls) in {dict, Mapping}


def _expected(cls: Any, value: object) -> ValueError:
    if cls is bool:
        hint = "; write true or false"
    elif cls in {str, Path}:
        hint = f"; quote it to make it a str: '\"{value}\"'"
    else:
        hint = ""
    return ValueError(f"expected {describe(cls)}, found {value!r} ({type(value).__name__}){hint}")


def _structure_scalar(value: Any, cls: Any) -> Any:
    accepted = {float: (int, float), Path: (str, Path)}.get(cls, (cls,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and cls is not bool):
        raise _expected(cls, value)
    return cls(value)


def _structure_literal(value: Any, cls: Any) -> Any:
    for allowed in get_args(cls):
        if type(allowed) is type(value) and allowed == value:
            return value
    raise ValueError(f"found {value!r}; {nearest(str(value), map(str, get_args(cls)))}")


def _sequence_hook(converter: cattrs.Converter) -> Callable[[Any], Hook]:
    def factory(cls: Any) -> Hook:
        origin: Any = get_origin(cls)
        members: tuple[Any, ...] = get_args(cls)
        homogeneous = origin is list or members[-1] is Ellipsis

        def structure(value: Any, _: Any) -> Any:
            if not isinstance(value, list | tuple) or (not homogeneous and len(value) != len(members)):
                raise _expected(cls, value)
            items, errors = [], []
            for index, item in enumerate(value):
                member = members[0] if homogeneous else members[index]
                try:
                    items.append(converter.structure(item, member))
                except Exception as error:  # noqa: BLE001 (collected, raised below)
                    error.add_note(IterableValidationNote(f"item {index}", index, member))
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"in {cls!r}", errors)
            return origin(items)

        return structure

    return factory


def _table_hook(converter: cattrs.Converter) -> Callable[[Any], Hook]:
    def factory(cls: Any) -> Hook:
        structure_items = mapping_structure_factory(cls, converter)

        def structure(value: Any, _: Any) -> Any:
            if not isinstance(value, Mapping):
                raise _expected(cls, value)
            return structure_items(value, cls)

        return structure

    return factory


def _union_hook(converter: cattrs.Converter) -> Callable[[Any], Hook]:
    def factory(cls: Any) -> Hook:
        members = [member for member in get_args(cls) if member is not NoneType]
        optional = len(members) < len(get_args(cls))

        def structure(value: Any, _: Any) -> Any:
            if optional and (value is None or value == NONE):
                return None
            if len(members) == 1:
                return converter.structure(value, members[0])
            for member in members:
                try:
                    return converter.structure(value, member)
                except Exception:  # noqa: BLE001, S112 (the next member may take it)
                    continue
            raise _expected(cls, value)

        return structure

    return factory


def _class_hook(converter: cattrs.Converter) -> Callable[[Any], Hook]:
    def factory(cls: Any) -> Hook:
        structure_fields = make_dict_structure_fn(
            cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True
        )

        def structure(value: Any, _: Any) -> Any:
            if isinstance(value, cls):
                return value
            if not isinstance(value, Mapping):
                raise TypeError(f"expected a table with fields of {cls.__name__}, found {value!r}")
            table = with_defaults(value, cls)
            if (kind := kind_of(cls)) is not None and table.get("kind") == kind:
                del table["kind"]
            return structure_fields(table, cls)

        return structure

    return factory


def _tagged_hook(converter: cattrs.Converter) -> Callable[[Any], Hook]:
    def factory(root: Any) -> Hook:
        def structure(value: Any, _: Any) -> Any:
            if isinstance(value, root):
                return value
            if not isinstance(value, Mapping):
                raise TypeError(f"expected a table with a kind of {root.__name__}, found {value!r}")
            kind = value.get("kind")
            member = root.kinds().get(kind) if isinstance(kind, str) else None
            if member is None:
                found = "required, but not given" if kind is None else f"found {kind!r}"
                problem = ValueError(f"{found}; {nearest(str(kind), root.kinds())}")
                problem.add_note(AttributeValidationNote("the kind of a union", "kind", str))
                raise ExceptionGroup(f"in {root!r}", [problem])
            return converter.structure(value, member)

        return structure

    return factory
