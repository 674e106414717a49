"""The weight pass: from the nodes that an input pass kept to the leaves.

It goes group by group: the gradients of one are in ``.grad``, and their hooks have run, before those of the next exist.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ._order import Addend, in_order, sequence
from ._saved import saved_tensors


@attrs.frozen
class Pruned:
    """A node of the input path whose gradients for some next edges were left out.

    Attributes:
        node: The node. It still holds what these gradients need.
        incoming: The gradients that it received, after all hooks.
        exits: The next edges, by index.
    """

    node: Node
    incoming: Sequence[Tensor | None]
    exits: dict[int, GradientEdge]

    def compute(self) -> list[Addend]:
        """Computes what was left out, if called where the engine prunes all else."""
        call = cast("Callable[..., Tensor | tuple[Tensor | None, ...] | None]", self.node)
        found = call(*self.incoming)  # without the node's hooks, which ran in the input pass
        gradients = found if isinstance(found, tuple) else (found,)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            _check(self.node, gradients)
        return [
            Addend(edge, _fit(gradient, edge), sequence(self.node))
            for index, edge in self.exits.items()
            if (gradient := gradients[index]) is not None
        ]


Source: TypeAlias = Addend | Pruned


def accumulate(sources: Sequence[Source]) -> None:
    """Carries the gradients of ``sources``, in the order in which a whole backward pass meets them, to the leaves."""

    def run() -> None:
        for group in _connected(sources):
            addends = [a for source in group for a in (source.compute() if isinstance(source, Pruned) else [source])]
            with in_order(addends) as first:
                if first:
                    torch.autograd.backward([a.edge for a in first], [a.gradient for a in first])

    _call_with_pruning(run, [edge for source in sources for edge in _edges(source)])


def _edges(source: Source) -> list[GradientEdge]:
    return list(source.exits.values()) if isinstance(source, Pruned) else [source.edge]


def _connected(sources: Sequence[Source]) -> list[list[Source]]:
    """Groups sources from which a common node can be reached: a leaf gets its gradient in one run of the engine."""
    leader = list(range(len(sources)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    reached_by: dict[Node | None, int] = {}
    for index, source in enumerate(sources):
        stack: list[Node | None] = [edge.node for edge in _edges(source)]
        while stack:
            node = stack.pop()
            if node in reached_by:
                first, last = sorted((find(index), find(reached_by[node])))
                leader[last] = first
            else:
                reached_by[node] = index
                stack.extend(_below(node))
    groups: dict[int, list[Source]] = {}
    for index, source in enumerate(sources):
        groups.setdefault(find(index), []).append(source)
    return list(groups.values())


def _below(node: Node | None) -> list[Node | None]:
    # None stands for what saved tensor hooks of others packed, as a node common to all that hold some:
    # activation checkpointing recomputes a block once for each run of the engine that asks for it.
    if node is None:
        return []
    packed = any(saved.unpack_hook is not None for saved in saved_tensors(node))
    return [child for child, _ in node.next_functions if child is not None] + [None] * packed


def _call_with_pruning(work: Callable[[], None], wanted: Sequence[GradientEdge]) -> None:
    """Calls ``work`` inside a run of the engine that wants the gradients of ``wanted``.

    A node called there computes the gradients of the wanted among its next edges and no other. The run itself goes
    through one node that has nothing to do with them.
    """
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        anchor.register_hook(lambda _: work())
        torch.autograd.grad(anchor.clone(), [get_gradient_edge(anchor), *wanted], allow_unused=True)


def _check(node: Node, gradients: Sequence[Tensor | None]) -> None:
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.isnan().any():
            raise RuntimeError(
                f"Function {node.name()!r} returned nan values in its {index}th output."
            )  # as the engine


def _fit(gradient: Tensor, edge: GradientEdge) -> Tensor:
    """What the engine does with a gradient between two nodes: sums over broadcast dims, casts."""
    metadata = edge.node._input_metadata[edge.output_nr]  # noqa: SLF001  # as torch.autograd.grad does
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)
