"""The graph of a plan as a picture, in which what differs in numbers alone is one node."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Literal
from xml.sax.saxutils import escape

import attrs

from ._collapse import Collapsed, skeleton
from ._describe import describe
from ._mapper import Group
from ._mappers._chain import Chain
from ._spec import TensorSpec

Kind = Literal["source", "between", "made", "leaf"]
_FILL = {"source": "#dbeafe", "between": "#f3f4f6", "made": "#dcfce7", "leaf": "#ffffff"}
_CHAR, _LINE, _PAD, _GAP_X, _GAP_Y = 7.3, 16, 8, 48, 12


@attrs.define
class _Node:
    """Tensors, or a leaf that makes some of others."""

    kind: Kind
    label: Collapsed | str
    count: int = 0
    """Of leaves: how many are one here."""
    specs: set[TensorSpec] = attrs.field(factory=set)

    @property
    def lines(self) -> list[str]:
        times = f" ×{self.count}" if self.count > 1 else ""
        specs = [str(spec) for spec in self.specs] if len(self.specs) == 1 else []
        return [f"{self.label}{times}", *specs]


@attrs.frozen
class Picture:
    """Nodes in the order in which they were met, and edges between their numbers."""

    nodes: Sequence[_Node]
    edges: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, groups: Iterable[Group], specs: Mapping[str, TensorSpec]) -> Picture:
        """The picture of groups that take inputs with these specs."""
        drawing = _Drawing()
        for group in groups:
            taken = {name: drawing.tensor(name, "source", specs.get(name)) for name in group.inputs}
            drawing.add(group, taken, functools.partial(drawing.tensor, kind="made"))
        return cls(drawing.nodes, list(drawing.edges))

    def mermaid(self) -> str:
        """A flowchart in Mermaid's language."""
        lines = ["flowchart LR"]
        for number, node in enumerate(self.nodes):
            opening, closing = ("([", "])") if node.kind == "leaf" else ("[", "]")
            label = "<br/>".join(map(_mermaid_text, node.lines))
            lines.append(f'  n{number}{opening}"{label}"{closing}:::{node.kind}')
        lines += [f"  n{first} --> n{second}" for first, second in self.edges]
        lines += [f"  classDef {kind} fill:{fill},stroke:#6b7280,color:#111827" for kind, fill in _FILL.items()]
        return "\n".join(lines) + "\n"

    def svg(self) -> str:
        """An image that needs nothing else: columns from what is read to what is made."""
        boxes, width, height = self._layout()
        size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">']
        for first, second in self.edges:
            x, y, w, h = boxes[first]
            to_x, to_y, _, to_h = boxes[second]
            start, end, middle = (x + w, y + h / 2), (to_x, to_y + to_h / 2), (x + w + to_x) / 2
            curve = f"M{start[0]:.1f} {start[1]:.1f}C{middle:.1f} {start[1]:.1f} {middle:.1f} {end[1]:.1f}"
            parts.append(f'<path d="{curve} {end[0]:.1f} {end[1]:.1f}" fill="none" stroke="#6b7280"/>')
        for node, (x, y, w, h) in zip(self.nodes, boxes):
            radius = h / 2 if node.kind == "leaf" else 3
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:.1f}" '
                f'fill="{_FILL[node.kind]}" stroke="#6b7280"/>'
            )
            for number, line in enumerate(node.lines, start=1):
                baseline = y + _PAD / 2 + number * _LINE - 4
                parts.append(f'<text x="{x + _PAD:.1f}" y="{baseline:.1f}">{escape(_printable(line))}</text>')
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _layout(self) -> tuple[list[tuple[float, float, float, float]], float, float]:
        """Left, top, width and height of each node, and the size of all."""
        column = [0] * len(self.nodes)
        changed = True
        while changed:  # there are no cycles
            changed = False
            for first, second in self.edges:
                if column[second] <= column[first]:
                    column[second], changed = column[first] + 1, True
        sizes = [(max(map(len, n.lines)) * _CHAR + 2 * _PAD, len(n.lines) * _LINE + _PAD) for n in self.nodes]
        boxes: list[tuple[float, float, float, float]] = [(0, 0, 0, 0)] * len(self.nodes)
        left, height = float(_GAP_Y), 0.0
        for each in range(max(column, default=-1) + 1):
            members = [number for number in range(len(self.nodes)) if column[number] == each]
            top = float(_GAP_Y)
            for number in members:
                boxes[number] = (left, top, *sizes[number])
                top += sizes[number][1] + _GAP_Y
            left += max(sizes[number][0] for number in members) + _GAP_X
            height = max(height, top)
        return boxes, max(left - _GAP_X + _GAP_Y, _GAP_Y), max(height, _GAP_Y)


class _Drawing:
    """Nodes and edges as they are met."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.edges: dict[tuple[int, int], None] = {}
        self._numbers: dict[Hashable, int] = {}

    def add(
        self, group: Group, taken: Mapping[str, int], made: Callable[[str], int], depth: tuple[int, ...] = ()
    ) -> Mapping[str, int]:
        """Adds the leaves of a group; by name, `taken` and the result are nodes, and `made` gives those of outputs."""
        if isinstance(group.mapper, Chain):
            return self._add_chain(group, group.mapper, taken, made, depth)
        outputs = {name: made(name) for name in group.outputs}
        inputs = list(dict.fromkeys(taken[name] for name in group.inputs))
        label = describe(group.mapper)
        leaf = self._node(("leaf", label, tuple(inputs), tuple(sorted(set(outputs.values())))), _Node("leaf", label))
        self.nodes[leaf].count += 1
        self.edges |= {(number, leaf): None for number in inputs}
        self.edges |= {(leaf, number): None for number in outputs.values()}
        return outputs

    def _add_chain(
        self,
        group: Group,
        chain: Chain,
        taken: Mapping[str, int],
        made: Callable[[str], int],
        depth: tuple[int, ...],
    ) -> Mapping[str, int]:
        last = {name: chain.maker(name, len(chain.steps)) for name in group.outputs}
        there = dict(taken)
        for number, step in enumerate(chain.steps):
            below = (*depth, number)
            final = {name for name, maker in last.items() if maker is not None and maker[0] == number}
            between = functools.partial(self.tensor, kind="between", depth=below)
            step_made: dict[str, int] = {}
            for each in step:
                step_made |= self.add(each, there, _either(final, made, between), below)
            there |= step_made
        return {name: there[name] for name in group.outputs}

    def tensor(self, name: str, kind: Kind, spec: TensorSpec | None = None, depth: tuple[int, ...] = ()) -> int:
        """The node for tensors of such a name."""
        number = self._node((kind, skeleton(name), depth), _Node(kind, Collapsed.like(name)))
        label = self.nodes[number].label
        assert isinstance(label, Collapsed)
        label.add(name)
        if spec is not None:
            self.nodes[number].specs.add(spec)
        return number

    def _node(self, key: Hashable, new: _Node) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(new)
        return self._numbers[key]


def _either(names: Container[str], first: Callable[[str], int], other: Callable[[str], int]) -> Callable[[str], int]:
    return lambda name: first(name) if name in names else other(name)


def _mermaid_text(text: str) -> str:
    return re.sub(r"[^\w .,:;×→…=()\[\]{}*+/-]", lambda found: f"#{ord(found[0])};", _printable(text))


def _printable(text: str) -> str:
    """Without what XML cannot hold, nor anything that is no visible character."""
    return "".join(char if char.isprintable() else "�" for char in text)
