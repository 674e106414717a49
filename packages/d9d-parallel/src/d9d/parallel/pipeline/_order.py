"""Sums of gradients in the order of a whole backward pass.

The engine runs nodes by falling sequence number and adds up what arrives at an edge as it comes. The gradients that it
starts from come first. Where an edge gets some of these, and also some from nodes within the weight pass that come
earlier in a whole backward pass, a sum of three would be rounded differently.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


class Addend(NamedTuple):
    """A gradient that enters a weight pass.

    Attributes:
        edge: Where it enters.
        gradient: In the shape and dtype of the edge.
        sequence: The sequence number of the node that it comes from, infinite for a root of the whole backward pass.
    """

    edge: GradientEdge
    gradient: Tensor
    sequence: float


@contextlib.contextmanager
def in_order(addends: Sequence[Addend]) -> Generator[list[Addend]]:
    """Yields the addends to start the engine from; while it runs here, the others join where it is their turn."""
    if len({addend.sequence for addend in addends}) < 2:  # all else comes after them
        yield list(addends)
        return
    entering: dict[tuple[Node, int], list[Addend]] = defaultdict(list)
    for addend in addends:
        entering[addend.edge.node, addend.edge.output_nr].append(addend)
    within: dict[tuple[Node, int], list[tuple[Node, int]]] = defaultdict(list)
    for node in _reached_from(node for node, _ in entering):
        for index, (child, number) in enumerate(node.next_functions):
            if child is not None and (child, number) in entering:
                within[child, number].append((node, index))

    first: list[Addend] = []
    with contextlib.ExitStack() as hooks:
        for edge, own in entering.items():
            others = within[edge]
            if len(own) + len(others) > 2 and any(a.sequence < sequence(node) for a in own for node, _ in others):
                total = _Sum({(-a.sequence, i): a.gradient for i, a in enumerate(own)}, len(others))
                for node, index in others:
                    hooks.callback(node.register_hook(functools.partial(total.add, sequence(node), index)).remove)
            else:
                first += own
        yield first


def sequence(node: Node) -> int:
    """The number that the engine orders nodes by: later in the forward pass is higher."""
    number: int = node._sequence_nr()  # noqa: SLF001
    return number


@attrs.define
class _Sum:
    """Holds back the addends of an edge; the last node to bring one hands on the sum of all."""

    addends: dict[tuple[float, int], Tensor | None]
    awaited: int

    def add(
        self, number: int, index: int, outgoing: tuple[Tensor | None, ...], _incoming: object
    ) -> tuple[Tensor | None, ...]:
        self.addends[-number, index] = outgoing[index]
        self.awaited -= 1
        total = None
        if self.awaited == 0:
            total = functools.reduce(torch.add, [a for _, a in sorted(self.addends.items()) if a is not None])
        return *outgoing[:index], total, *outgoing[index + 1 :]


def _reached_from(nodes: Iterable[Node]) -> set[Node]:
    reached: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(child for child, _ in node.next_functions if child is not None)
    return reached
