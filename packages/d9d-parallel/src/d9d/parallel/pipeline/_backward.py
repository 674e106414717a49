"""The backward pass of one microbatch through a stage: whole, or in two parts, gradients of the inputs first.

An input pass runs the nodes on the way from the outputs to the inputs (`InputPath`). The engine leaves out all other
gradients of such a node, unless the node is a Python function, which computes all of them at once. A hook on each node
with next edges away from the path keeps what was computed, and what the node needs to compute the rest. The weight pass
calls these nodes for the missing gradients and lets the engine carry all of them to the leaves.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ._graph import InputPath, input_path
from ._order import Addend, sequence
from ._saved import free_all, free_unread
from ._weights import Pruned, Source, accumulate

Root: TypeAlias = Tensor | GradientEdge


def backward(
    outputs: Sequence[Root], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Runs a whole backward pass: weight gradients accumulate into the leaves' ``.grad``.

    Args:
        outputs: What the stage returned and requires grad, as tensors or as gradient edges.
        gradients: The gradient of each output. None for an output of one element means 1.
        inputs: Leaves that require grad.

    Returns:
        The gradient of each input, None for one that no output depends on. Their ``.grad`` is None afterwards.
    """
    for x in inputs:
        x.grad = None
    torch.autograd.backward([_edge(root) for root in outputs], list(gradients))
    found = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    return found


def backward_inputs(
    outputs: Sequence[Root], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], "WeightBackward"]:
    """Computes the gradients of the inputs and frees what was saved for nothing else.

    The forward pass needs no preparation. A Python function computes its weight gradients now, because the engine
    cannot leave them out; `join` splits it. A checkpointed block is recomputed in each part. What saved tensor hooks
    packed, and what a Python function holds as attributes, stays until the rest has run.

    Args:
        outputs: As in `backward`.
        gradients: As in `backward`. The rest may read them too: do not overwrite them before it has run.
        inputs: As in `backward`.

    Returns:
        The gradient of each input, None for one that no output depends on, and the rest of the backward pass.

    Raises:
        ValueError: If an output of several elements has no gradient.
    """
    roots = [
        Addend(_edge(root), _ones(root) if gradient is None else gradient, math.inf)
        for root, gradient in zip(outputs, gradients, strict=True)
    ]
    path = input_path((root.edge.node for root in roots), inputs)
    run = _InputPass(path, [root for root in roots if root.edge.node not in path])
    roots = [root for root in roots if root.edge.node in path]
    if not roots:
        return [None for _ in inputs], WeightBackward(run.sources)

    hooks = [node.register_hook(functools.partial(run.keep, node)) for node in path.exits]
    try:
        found = torch.autograd.grad(
            [root.edge for root in roots],
            inputs,
            [root.gradient for root in roots],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    run.free(path.parents)
    return list(found), WeightBackward(run.sources)


class WeightBackward:
    """What is left of a backward pass after `backward_inputs`."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources: list[Source] | None = sources

    def run(self) -> None:
        """Accumulates the weight gradients into the leaves' ``.grad``, through the leaves' hooks, and frees everything.

        Raises:
            RuntimeError: If it ran before.
        """
        if self._sources is None:
            raise RuntimeError("this weight pass has run before; it can run once")
        sources, self._sources = self._sources, None
        accumulate(sources)


@attrs.frozen
class _InputPass:
    """What an input pass leaves behind while it runs."""

    path: InputPath
    sources: list[Source]
    kept: set[Node] = attrs.field(factory=set, init=False)
    freed: set[Node] = attrs.field(factory=set, init=False)

    def keep(self, node: Node, computed: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
        """Runs after a node of the path that has exits."""
        exits = self.path.exits[node]
        self.sources.extend(
            Addend(edge, gradient, sequence(node))
            for index, edge in exits.items()
            if (gradient := computed[index]) is not None
        )
        missing = {index: edge for index, edge in exits.items() if computed[index] is None}
        if missing and not isinstance(node, BackwardCFunction):
            self.sources.append(Pruned(node, incoming, missing))
            free_unread(node, missing)
            self.kept.add(node)
        self.free([node])

    def free(self, nodes: Iterable[Node]) -> None:
        """Frees what ``nodes`` and those above them saved. They have all run."""
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node not in self.freed:
                self.freed.add(node)
                stack.extend(self.path.parents[node])
                if node not in self.kept:
                    free_all(node)


def _edge(root: Root) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _ones(root: Root) -> Tensor:
    if isinstance(root, Tensor):
        ones = torch.ones_like(root.detach())
    else:
        metadata = root.node._input_metadata[root.output_nr]  # noqa: SLF001  # as torch.autograd.grad does
        ones = torch.ones(metadata.shape, dtype=metadata.dtype, device=metadata.device)
    if ones.numel() != 1:
        raise ValueError(
            f"an output of shape {tuple(ones.shape)!r} has no gradient (None): only one element can do without"
        )
    return ones
