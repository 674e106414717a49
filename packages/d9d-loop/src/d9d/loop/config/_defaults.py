"""What a table leaves out comes from the instance that is the default of its field."""

from collections.abc import Mapping
from typing import Any

import attrs


def default_of(field: "attrs.Attribute[Any]") -> Any:
    """The default value of a field, or `attrs.NOTHING` where it is required."""
    return field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type,union-attr]


def with_defaults(table: Mapping[str, Any], cls: type[Any]) -> dict[str, Any]:
    """Complete the tables inside `table`, which is about to become a `cls`.

    ``optimizer = {lr = 0.1}`` for a field with default ``AdamWConfig(lr=1.0, eps=1e-6)`` keeps its eps of 1e-6, not
    that of the class.
    """
    completed = dict(table)
    for field in attrs.fields(cls):
        given = table.get(field.alias)
        if isinstance(given, Mapping):
            completed[field.alias] = _complete(given, default_of(field))
    return completed


def _complete(table: Mapping[str, Any], default: Any) -> dict[str, Any]:
    if not attrs.has(type(default)):
        return dict(table)
    fields = {field.alias: getattr(default, field.name) for field in attrs.fields(type(default)) if field.init}
    if hasattr(default, "kind"):
        fields["kind"] = default.kind
        if table.get("kind", default.kind) != default.kind:
            return dict(table)
    nested = {name: _complete(inner, fields.get(name)) for name, inner in table.items() if isinstance(inner, Mapping)}
    return fields | dict(table) | nested
