"""Freeing what the nodes of an autograd graph saved in the forward pass."""

import functools
from collections.abc import Container, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

# In a product the gradient of a factor does not read that factor, but each run of the node unpacks both: the next edge
# whose gradient reads the saved factor.
_READER = {
    "MmBackward0": {"self": 1, "mat2": 0},
    "BmmBackward0": {"self": 1, "mat2": 0},
    "AddmmBackward0": {"mat1": 2, "mat2": 1},
    "BaddbmmBackward0": {"batch1": 2, "batch2": 1},
    "MulBackward0": {"self": 1, "other": 0},
}


class SavedTensor(Protocol):
    """What ``node._raw_saved_…`` gives: a tensor as the node holds it."""

    @property
    def data(self) -> Any: ...
    @property
    def unpack_hook(self) -> Any: ...
    def register_hooks(self, pack: Any, unpack: Any, /) -> None: ...


def saved_tensors(node: Node) -> Iterator[SavedTensor]:
    for name in ("_raw_saved_tensors",) if isinstance(node, BackwardCFunction) else _fields(type(node)):
        value = getattr(node, name)
        yield from value if isinstance(value, tuple) else (value,)


def free_all(node: Node) -> None:
    """Frees the tensors that ``node`` saved: it must not run again.

    What the hooks of others packed (activation checkpointing, offloading) cannot be taken back and stays.
    """
    for saved in saved_tensors(node):
        _free(saved)


def free_unread(node: Node, edges: Container[int]) -> None:
    """Frees what ``node`` does not read if only the gradients of its next ``edges`` are still to be computed."""
    for name, reader in _READER.get(node.name(), {}).items():
        if reader not in edges:
            _free(getattr(node, f"_raw_saved_{name}"))


@functools.cache
def _fields(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _free(saved: SavedTensor) -> None:
    if saved.data is not None and saved.unpack_hook is None:
        saved.register_hooks(_describe, _stand_in)


def _describe(tensor: Tensor) -> Tensor:
    # To pack a tensor is the documented way to make a node let go of it. NaN would show up if it were read after all.
    return tensor.new_full((), torch.nan if tensor.is_floating_point() else 0).expand(tensor.shape)


def _stand_in(packed: Tensor) -> Tensor:
    return packed
