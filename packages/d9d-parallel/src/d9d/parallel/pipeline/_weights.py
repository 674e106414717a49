"""The weight pass: from the nodes that an input pass kept to the leaves."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients: TypeAlias = list[tuple[GradientEdge, Tensor | None]]


@attrs.frozen
class Known:
    """Gradients that exist already, for edges that lead to weights. None for an edge of one element means 1."""

    gradients: Gradients

    @property
    def edges(self) -> list[GradientEdge]:
        return [edge for edge, _ in self.gradients]

    def compute(self) -> Gradients:
        return self.gradients


@attrs.frozen
class Pruned:
    """A node of the input path whose gradients for some next edges were left out.

    Attributes:
        node: The node. It still holds what it saved.
        incoming: The gradients that it received, after all hooks.
        exits: Next edges without a gradient yet, by index.
    """

    node: Node
    incoming: Sequence[Tensor | None]
    exits: dict[int, GradientEdge]

    @property
    def edges(self) -> list[GradientEdge]:
        return list(self.exits.values())

    def compute(self) -> Gradients:
        call = cast("Callable[..., Tensor | tuple[Tensor | None, ...] | None]", self.node)
        found = call(*self.incoming)  # without the node's hooks, which ran in the input pass
        gradients = found if isinstance(found, tuple) else (found,)
        return [
            (edge, _fit(gradient, edge)) for i, edge in self.exits.items() if (gradient := gradients[i]) is not None
        ]


Source: TypeAlias = Known | Pruned


def accumulate(sources: Sequence[Source]) -> None:
    """Carries the gradients of ``sources``, in the order in which a whole backward pass meets them, to the leaves."""

    def run_groups() -> None:
        for group in _connected(sources):
            gradients = [item for source in group for item in source.compute()]
            if gradients:
                torch.autograd.backward([edge for edge, _ in gradients], [gradient for _, gradient in gradients])

    _call_with_pruning(run_groups, [edge for source in sources for edge in source.edges])


def _connected(sources: Sequence[Source]) -> list[list[Source]]:
    """Groups sources from which a common node can be reached: a leaf gets its gradient in one run of the engine."""
    leader = list(range(len(sources)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    reached_by: dict[Node, int] = {}
    for index, source in enumerate(sources):
        stack = [edge.node for edge in source.edges]
        while stack:
            node = stack.pop()
            if node in reached_by:
                first, last = sorted((find(index), find(reached_by[node])))
                leader[last] = first
            else:
                reached_by[node] = index
                stack.extend(child for child, _ in node.next_functions if child is not None)
    groups: dict[int, list[Source]] = {}
    for index, source in enumerate(sources):
        groups.setdefault(find(index), []).append(source)
    return list(groups.values())


def _call_with_pruning(work: Callable[[], None], wanted: Sequence[GradientEdge]) -> None:
    """Calls ``work`` inside a run of the engine that wants the gradients of ``wanted``.

    A node called there computes the gradients of the wanted among its next edges and no other. The run itself goes
    through one node that has nothing to do with them.
    """
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        anchor.register_hook(lambda _: work())
        torch.autograd.grad(anchor.clone(), [get_gradient_edge(anchor), *wanted], allow_unused=True)


def _fit(gradient: Tensor, edge: GradientEdge) -> Tensor:
    """What the engine does with a gradient between two nodes: sums over broadcast dims, casts."""
    metadata = edge.node._input_metadata[edge.output_nr]  # noqa: SLF001 (as torch.autograd.grad does)
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)
