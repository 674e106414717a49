"""Names of tensors: patterns with fields, the natural order, nearest names."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Collection, Iterable, Mapping

import attrs


def natural_key(name: str) -> tuple[list[tuple[str, int]], str]:
    """Sorts digits by value: `layers.2` before `layers.10`."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)], name


def quote_with_nearest(names: Iterable[str], candidates: Collection[str]) -> list[str]:
    """The names, quoted, in natural order, each with a remark that says which candidate is most like it, if any is.

    Looks for the first names only where there are many of both: a wrong prefix on all names would take hours.
    """
    comparisons = 20_000
    quoted = []
    for name in sorted(names, key=natural_key):
        comparisons -= len(candidates)
        found = difflib.get_close_matches(name, candidates, n=1) if comparisons > 0 else []
        quoted.append(f"{name!r} (nearest: {found[0]!r})" if found else repr(name))
    return quoted


@attrs.frozen(repr=False)
class Pattern:
    """A name in which `{field}` stands for one part between dots, such as `layers.{layer}.weight`."""

    text: str
    fields: frozenset[str] = attrs.field(init=False, eq=False)
    _regex: re.Pattern[str] | None = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        regex, fields = "", set[str]()
        for literal, field, spec, conversion in string.Formatter().parse(self.text):
            regex += re.escape(literal)
            if field is None:
                continue
            if not field.isidentifier() or spec or conversion:
                raise ValueError(f"a field of a pattern is a bare identifier like {{layer}}, not so in {self.text!r}")
            regex += f"(?P={field})" if field in fields else f"(?P<{field}>[^.]+)"
            fields.add(field)
        object.__setattr__(self, "fields", frozenset(fields))
        object.__setattr__(self, "_regex", re.compile(regex) if fields else None)

    def match(self, name: str) -> dict[str, str] | None:
        """Values of the fields with which the pattern is `name`."""
        if self._regex is None:
            return {} if name == self.text else None
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, values: Mapping[str, str]) -> Pattern:
        """The pattern with some fields filled in; the others stay."""
        return Pattern(self.text.format_map({field: values.get(field, f"{{{field}}}") for field in self.fields}))

    @property
    def name(self) -> str:
        """The pattern as a plain name.

        Raises:
            ValueError: It has fields.
        """
        if self.fields:
            raise ValueError(f"{self.text!r} has fields: bind the mapper to names first")
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)


def as_pattern(text: str | Pattern) -> Pattern:
    """Converter for fields of leaves."""
    return text if isinstance(text, Pattern) else Pattern(text)


def require_same_fields(*patterns: Pattern) -> None:
    """Raises a ValueError unless all patterns have the same fields."""
    if any(pattern.fields != patterns[0].fields for pattern in patterns):
        raise ValueError(f"all names must have the same fields, not so in {', '.join(map(repr, patterns))}")


def matches(patterns: Iterable[Pattern], names: Collection[str], *, without: str | None = None) -> list[dict[str, str]]:
    """Every assignment of fields by which a pattern is one of `names`, in natural order.

    The field `without` is left out of the assignments. Patterns without any other field give the one empty assignment,
    whether the name exists or not.
    """
    found: dict[tuple[tuple[str, str], ...], None] = {}
    for pattern in patterns:
        if pattern.fields <= {without}:
            return [{}]
        for name in names:
            values = pattern.match(name)
            if values is not None:
                found[tuple(sorted((field, value) for field, value in values.items() if field != without))] = None
    return [dict(items) for items in sorted(found, key=lambda items: [natural_key(value) for _, value in items])]
