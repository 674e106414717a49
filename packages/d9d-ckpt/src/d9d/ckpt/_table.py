"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ._collapse import Collapsed, collapse, skeleton
from ._describe import kinds
from ._describe_bytes import describe_bytes
from ._mapper import Group
from ._spec import Region, TensorSpec


@attrs.define
class _Row:
    """Outputs that differ in numbers alone, made in the same way of inputs that do."""

    made: Collapsed
    spec: TensorSpec
    by: str
    inputs: list[str] = attrs.field(factory=list)
    nbytes: int = 0


def table(
    groups: Sequence[Group],
    *,
    outputs: Mapping[str, TensorSpec],
    wants: Mapping[str, tuple[Region, ...]],
    bytes_by_group: Sequence[int],
    bytes_by_file: Mapping[str, int],
    peak_bytes: int,
) -> str:
    """What is made, of which shape, by which leaves, from what, and how much is read; then the files."""
    rows: dict[Any, _Row] = {}
    for group, nbytes in zip(groups, bytes_by_group):
        wanted = [name for name in group.outputs if name in wants]
        taken = tuple(dict.fromkeys(map(skeleton, group.inputs)))
        by = " → ".join(kinds(group))
        for name in wanted:
            key = (skeleton(name), outputs[name], by, taken)
            row = rows.setdefault(key, _Row(Collapsed.like(name), outputs[name], by))
            row.made.add(name)
            row.inputs += group.inputs
            row.nbytes += nbytes if name == wanted[0] else 0
    title = (
        f"{len(groups)} groups make {len(wants)} tensors: {describe_bytes(sum(bytes_by_group))} to read, "
        f"{describe_bytes(peak_bytes)} at most in a group"
    )
    body = [
        [
            str(row.made),
            str(row.spec),
            str(row.made.count),
            row.by,
            ", ".join(collapse(row.inputs)) or "nothing",
            describe_bytes(row.nbytes),
        ]
        for row in rows.values()
    ]
    lines = [title, *_aligned([["makes", "each", "count", "by", "from", "reads"], *body])]
    files = [[file or "the source", describe_bytes(nbytes)] for file, nbytes in bytes_by_file.items()]
    return "\n".join([*lines, *_aligned([["file", "reads"], *files])] if files else lines)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
