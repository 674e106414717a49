"""Which part of an autograd graph a backward pass to some inputs runs through."""

from collections.abc import Iterable, Sequence

import attrs
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@attrs.frozen
class InputPath:
    """The nodes that lie between the roots of a backward pass and its inputs.

    Attributes:
        parents: For each node of the path the nodes that hand it a gradient. All of them are on the path too.
        exits: For each node of the path that has next edges away from it, towards weights only: those edges, by index.
    """

    parents: dict[Node, list[Node]]
    exits: dict[Node, dict[int, GradientEdge]]

    def __contains__(self, node: Node) -> bool:
        return node in self.parents


def input_path(roots: Iterable[Node], inputs: Sequence[Tensor]) -> InputPath:
    """Finds the nodes on any way from ``roots`` to ``inputs``, which are leaves that require grad."""
    path = InputPath(parents={get_gradient_edge(x).node: [] for x in inputs}, exits={})
    for node in _children_first(roots):
        children = [child for child, _ in node.next_functions if child in path.parents]
        if children:
            path.parents[node] = []
            for child in children:
                path.parents[child].append(node)
            exits = {
                index: GradientEdge(child, number)
                for index, (child, number) in enumerate(node.next_functions)
                if child is not None and child not in path.parents
            }
            if exits:
                path.exits[node] = exits
    return path


def _children_first(roots: Iterable[Node]) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    return order
