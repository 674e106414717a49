"""Certificates as text and as Markdown."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

import attrs

from d9d.mesh import MeshConfig

from ._comparison import Quantity
from ._hint import hint
from ._layout_result import Failure, LayoutResult

_COLUMNS = (Quantity.LOSS, Quantity.GRADIENT, Quantity.NORM, Quantity.PARAMETER)


def describe_mesh(mesh: MeshConfig) -> str:
    """The degrees above 1, in words."""
    degrees = [f"{name} {degree}" for name, degree in attrs.asdict(mesh).items() if degree != 1]
    return " · ".join(degrees) or "one rank"


def text_table(layouts: Iterable[LayoutResult]) -> str:
    """A line a layout, with the largest relative error of each kind."""
    rows = [("layout", "ranks", *(f"{quantity.value} error" for quantity in _COLUMNS), "verdict")]
    for layout in layouts:
        found = [layout.worst(quantity) for quantity in _COLUMNS]
        errors = ["" if worst is None else f"{worst.error:.1e}" for worst in found]
        rows.append((describe_mesh(layout.mesh), str(layout.ranks), *errors, layout.verdict))
    return "\n".join(_aligned(rows))


def parameter_table(layout: LayoutResult) -> str:
    """A line a parameter, with the worst of all ranks, steps and numbers of microbatches."""
    rows = [("parameter", "initial error", "gradient ratio", "gradient error", "updated error")]
    for name in dict.fromkeys(c.name for c in layout.comparisons if c.quantity is Quantity.PARAMETER):
        initial, gradient, updated = (
            layout.worst(quantity, name) for quantity in (Quantity.INITIAL, Quantity.GRADIENT, Quantity.PARAMETER)
        )
        assert initial is not None
        assert updated is not None
        ratio, error = ("frozen", "") if gradient is None else (f"{gradient.ratio:.6f}", f"{gradient.error:.1e}")
        rows.append((name, f"{initial.error:.1e}", ratio, error, f"{updated.error:.1e}"))
    return "\n".join(_aligned(rows))


def describe_failures(layout: LayoutResult) -> str:
    """What went wrong first under one mesh."""
    failures = layout.failures()
    worst = failures[0].worst
    when = f"in step {worst.step}" if worst.step else "before the first step"
    parts = "1 microbatch" if worst.microbatches == 1 else f"{worst.microbatches} microbatches"
    order = f" in the order of {worst.schedule}" if worst.schedule else ""
    lines = [f"{describe_mesh(layout.mesh)} failed {when}, with {parts} a data rank{order}:"]
    rows = [
        (
            failure.worst.quantity.value,
            failure.worst.name,
            f"ratio {failure.worst.ratio:.4f}",
            f"error {failure.worst.error:.1e}",
            _extent(failure),
        )
        for failure in failures
    ]
    for row, failure in zip(_aligned(rows), failures):
        lines.append(f"  {row}")
        if guess := hint(failure, layout.mesh):
            lines.append(f"      {guess}")
    return "\n".join(lines)


def markdown_table(layouts: Iterable[LayoutResult]) -> str:
    """A row a layout: what was run and how it ended, without figures that differ from run to run."""
    rows = ["| layout | ranks | verdict |", "| --- | ---: | --- |"]
    for layout in layouts:
        verdict = layout.verdict if layout.refusal is None else f"refused: {layout.refusal}"
        rows.append(f"| {describe_mesh(layout.mesh)} | {layout.ranks} | {verdict.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def describe_refusals(layouts: Iterable[LayoutResult]) -> str:
    """Why meshes were refused."""
    lines = (f"{describe_mesh(layout.mesh)} was refused: {layout.refusal}" for layout in layouts if layout.refusal)
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines)


def _extent(failure: Failure) -> str:
    if failure.compared == 1:
        return ""
    if len(failure.names) == 1:
        return f"alone of {failure.compared}"
    return f"the worst of {len(failure.names)} that fail, of {failure.compared}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
