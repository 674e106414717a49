"""The text of ``--help``, from the fields of config classes and the docstrings below them."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import attrs

from ._defaults import default_of
from ._structure import describe, is_union
from ._tagged import is_union_root, kind_of


def help_text(cls: type[Any]) -> str:
    """All fields of a config class: path, type, default and the docstring under the field.

    The fields of a union's members follow its ``kind``, each member under its own heading.
    """
    head = [
        inspect.getdoc(cls) or cls.__name__,
        "",
        "--config FILE",
        *_indent("A TOML file; what follows overrides it."),
    ]
    return "\n".join([*head, *_class_lines(cls, "--", attrs.NOTHING)]) + "\n"


def _class_lines(cls: type[Any], prefix: str, instance: Any) -> Iterator[str]:
    types = get_type_hints(cls)
    docstrings = _field_docstrings(cls)
    for field in attrs.fields(cls):
        if field.init:
            default = default_of(field) if instance is attrs.NOTHING else getattr(instance, field.name)
            yield from _field_lines(prefix + field.alias, types[field.name], default, docstrings.get(field.name, ""))


def _field_lines(path: str, cls: Any, default: Any, docstring: str) -> Iterator[str]:
    members = get_args(cls) if is_union(cls) else (cls,)
    nested = next((member for member in members if is_union_root(member) or attrs.has(member)), None)
    if nested is None:
        yield f"{path} {describe(cls)} ({_shown(default)})"
        yield from _indent(docstring)
    elif is_union_root(nested):
        kinds = " | ".join(map(repr, sorted(nested.kinds())))
        yield f"{path}.kind {kinds} ({_shown(kind_of(type(default)) or default)})"
        yield from _indent(docstring)
        for kind, member in sorted(nested.kinds().items()):
            if attrs.fields(member):
                yield f"  with {path}.kind {kind}:"
                instance = default if isinstance(default, member) else attrs.NOTHING
                yield from (f"  {line}" for line in _class_lines(member, f"{path}.", instance))
    else:
        yield from _class_lines(nested, f"{path}.", attrs.NOTHING if default is None else default)


def _shown(default: Any) -> str:
    match default:
        case attrs.NOTHING:
            return "required"
        case None:
            return "default: none"
        case bool():
            return f"default: {str(default).lower()}"
        case tuple():
            return f"default: [{', '.join(map(str, default))}]"
        case _:
            return f"default: {default}"


def _indent(docstring: str) -> list[str]:
    return textwrap.wrap(docstring, width=100, initial_indent="    ", subsequent_indent="    ")


def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    """The string under each annotated field of a class and its bases; nothing where there is no source to read."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, following in itertools.pairwise(body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found
