"""Names of tensors: patterns with fields, the natural order, nearest names."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Collection, Iterable, Mapping

import attrs

from ._name_index import Names
from ._natural import natural_key
from ._nearest import Nearest

__all__ = [
    "Pattern",
    "as_pattern",
    "as_patterns",
    "matches",
    "natural_key",
    "quote_with_nearest",
    "require_list",
    "require_same_fields",
]

_QUOTED_WITH_NEAREST = 30
"""Names that are told their nearest: a wrong prefix on all of 100,000 needs no more, and would take minutes."""


def quote_with_nearest(names: Iterable[str], candidates: Collection[str]) -> list[str]:
    """The names, quoted, in natural order, the first ones with a remark that says which candidate is most like it."""
    ordered = sorted(names, key=natural_key)
    lookups = min(len(ordered), _QUOTED_WITH_NEAREST)
    nearest = Nearest(candidates, lookups=lookups) if lookups else None
    quoted = []
    for number, name in enumerate(ordered):
        found = nearest.find(name) if nearest is not None and number < lookups else None
        quoted.append(repr(name) if found is None else f"{name!r} (nearest: {found!r})")
    return quoted


_NO_FIELDS = frozenset[str]()


@attrs.frozen(repr=False)
class Pattern:
    """A name in which `{field}` stands for one part between dots, such as `layers.{layer}.weight`.

    A field may also be a piece of a part (`w_{i}`), and never holds a dot. A brace that is meant is doubled.
    """

    text: str
    fields: frozenset[str] = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        plain = "{" not in self.text and "}" not in self.text
        fields = _NO_FIELDS if plain else frozenset(field for _, field in _parse(self.text) if field is not None)
        object.__setattr__(self, "fields", fields)

    @classmethod
    def literal(cls, name: str) -> Pattern:
        """The pattern that is one name, whatever is in it."""
        return cls(_escape(name))

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        regex, seen = "", set[str]()
        for literal, field in _parse(self.text):
            regex += re.escape(literal)
            if field is not None:
                regex += f"(?P={field})" if field in seen else f"(?P<{field}>[^.]+)"
                seen.add(field)
        return re.compile(regex)

    @functools.cached_property
    def _has_no_brace(self) -> bool:
        return "{{" not in self.text and "}}" not in self.text

    @functools.cached_property
    def parts(self) -> tuple[str | None, ...]:
        """What is between the dots; None where a field is in it."""
        parts = map(Pattern, self.text.split("."))
        return tuple(None if part.fields else part.name for part in parts)

    def match(self, name: str) -> dict[str, str] | None:
        """Values of the fields with which the pattern is `name`."""
        if not self.fields:
            return {} if name == self.name else None
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, values: Mapping[str, str]) -> Pattern:
        """The pattern with some fields filled in; the others stay."""
        if not self.fields:
            return self
        if self._has_no_brace and values.keys() >= self.fields:  # in C: this runs for each group of each leaf
            return Pattern(_escape(self.text.format_map(values)))
        text = ""
        for literal, field in _parse(self.text):
            text += _escape(literal)
            if field is not None:
                text += _escape(values[field]) if field in values else f"{{{field}}}"
        return Pattern(text)

    @property
    def name(self) -> str:
        """The pattern as a plain name.

        Raises:
            ValueError: It has fields.
        """
        if self.fields:
            raise ValueError(f"{self.text!r} has fields: bind the mapper to names first")
        return self.text.replace("{{", "{").replace("}}", "}") if "{" in self.text or "}" in self.text else self.text

    def __repr__(self) -> str:
        return repr(self.text)


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[tuple[str, str | None], ...]:
    """Literal text and the field after it, alternating.

    Raises:
        ValueError: The text is no pattern.
    """
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is no pattern: {error} (a brace that is meant is doubled)") from error
    for _, field, spec, conversion in parsed:
        if field is not None and (not field.isidentifier() or spec or conversion):
            raise ValueError(f"a field of a pattern is a bare identifier like {{layer}}, not so in {text!r}")
    return tuple((literal, field) for literal, field, _, _ in parsed)


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}") if "{" in text or "}" in text else text


def as_pattern(text: str | Pattern) -> Pattern:
    """Converter for fields of leaves."""
    return text if isinstance(text, Pattern) else Pattern(text)


def require_list(names: object) -> None:
    """Raises a TypeError for one text, whose letters would be taken for names."""
    if isinstance(names, str):
        raise TypeError(f"several names are a list, got the text {names!r}")


def as_patterns(texts: Iterable[str | Pattern]) -> tuple[Pattern, ...]:
    """Converter for fields of leaves that have several names.

    Raises:
        TypeError: It is one text.
    """
    require_list(texts)
    return tuple(map(as_pattern, texts))


def require_same_fields(*patterns: Pattern) -> None:
    """Raises a ValueError unless all patterns have the same fields."""
    for pattern in patterns:
        if pattern.fields != patterns[0].fields:
            raise ValueError(f"all names must have the same fields, not so in {', '.join(map(repr, patterns))}")


def matches(patterns: Iterable[Pattern], names: Collection[str], *, without: str | None = None) -> list[dict[str, str]]:
    """Every assignment of fields by which a pattern is one of `names`, in an order that depends on the names alone.

    The field `without` is left out of the assignments. Patterns without any other field give the one empty assignment,
    whether the name exists or not.
    """
    index = Names.of(names)
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for pattern in patterns:
        if pattern.fields <= {without}:
            return [{}]
        order = sorted(pattern.fields - {without})
        for name in index.candidates(pattern.parts):
            values = pattern.match(name)
            if values is not None:
                key = tuple([values[field] for field in order])
                if key not in found:
                    found[key] = {field: values[field] for field in order}
    return list(found.values())
