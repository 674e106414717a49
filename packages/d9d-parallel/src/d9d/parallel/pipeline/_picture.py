"""Pictures of simulations: who does what when, in text and in SVG, in the manner of the zero-bubble papers."""

from xml.sax.saxutils import escape

from ._action import COMPUTE, Action, Op
from ._simulate import Event, Simulation

_COLOURS = {
    Op.F: ("#2f5fd0", "#9db8f2"),
    Op.B: ("#1f8a6b", "#93d3bf"),
    Op.I: ("#21a0b8", "#a3dde8"),
    Op.W: ("#3f8f2f", "#add99f"),
}
_MEANINGS = {Op.F: "forward", Op.B: "backward", Op.I: "gradient of inputs", Op.W: "gradient of weights"}
_UNIT, _ROW, _LEFT = 26, 26, 60


def to_text(simulation: Simulation) -> str:
    """A row a rank, time to the right; where ranks hold several stages, the stage comes first, as in ``4F0``."""
    rows, unit = _computations(simulation)
    spell = str if simulation.program.stages > simulation.program.ranks else _without_stage
    width = 1 + max(len(spell(event.action)) for row in rows for event in row)
    lines = []
    for rank, row in enumerate(rows):
        line = ""
        for event in row:
            start, end = (round(time / unit) * width for time in (event.start, event.end))
            cell = spell(event.action).ljust(end - start - 1, "-")
            line = line.ljust(start) + cell[: max(end - start - 1, 0)]
        lines.append(f"rank {rank}  {line}")
    return "\n".join((*lines, "", *_legend(simulation)))


def to_svg(simulation: Simulation) -> str:
    """The same as an SVG document: later stages of a rank are paler, a tooltip says what and when."""
    rows, unit = _computations(simulation)
    scale, legend = _UNIT / unit, _legend(simulation)
    width = _LEFT + max(simulation.step_time * scale, 640) + 20
    below = len(rows) * _ROW + 24
    height = below + (len(legend) + 1) * _ROW
    size = f"{width:g} {height:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for rank, row in enumerate(rows):
        top, first = 10 + rank * _ROW, simulation.program.stages_of(rank)[:1]
        parts.append(f'<text x="8" y="{top + 17:g}">rank {rank}</text>')
        parts += (_box(event, scale, top, pale=event.action.stage not in first) for event in row)
    used = {event.action.op for row in rows for event in row}
    for index, op in enumerate(op for op in _MEANINGS if op in used):
        left = _LEFT + index * 160
        parts.append(f'<rect x="{left:g}" y="{below:g}" width="14" height="14" fill="{_COLOURS[op][0]}"/>')
        parts.append(f'<text x="{left + 20:g}" y="{below + 12:g}">{op.value} {_MEANINGS[op]}</text>')
    for number, line in enumerate(legend, start=1):
        parts.append(f'<text x="{_LEFT:g}" y="{below + number * _ROW + 12:g}">{escape(line)}</text>')
    return "\n".join((*parts, "</svg>", ""))


def _box(event: Event, scale: float, top: float, *, pale: bool) -> str:
    left, width = _LEFT + event.start * scale, (event.end - event.start) * scale
    fill, ink = _COLOURS[event.action.op][pale], "black" if pale else "white"
    return (
        f"<g><title>{event.action}: {event.start:g} to {event.end:g}</title>"
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{_ROW - 2:g}" fill="{fill}" stroke="white"/>'
        f'<text x="{left + width / 2:g}" y="{top + 17:g}" fill="{ink}" text-anchor="middle">'
        f"{event.action.microbatch}</text></g>"
    )


def _legend(simulation: Simulation) -> list[str]:
    program = simulation.program
    counts = f"{program.ranks} ranks, {program.stages} stages, {program.microbatches} microbatches"
    return [
        f"{counts}: step time {simulation.step_time:g}, bubble {simulation.bubble:.1%}",
        f"most (stage, microbatch) alive, by rank: {', '.join(map(str, simulation.peak_live))}",
    ]


def _computations(simulation: Simulation) -> tuple[list[list[Event]], float]:
    """Each rank's computations, and the time of the shortest, for which there is to be room for a label."""
    rows = [[event for event in row if event.action.op in COMPUTE] for row in simulation.timeline]
    lengths = [event.end - event.start for row in rows for event in row]
    return rows, min((length for length in lengths if length > 0), default=1.0)


def _without_stage(action: Action) -> str:
    return f"{action.op.value}{action.microbatch}"
