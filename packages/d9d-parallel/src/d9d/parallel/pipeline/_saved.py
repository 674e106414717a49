"""Freeing what the nodes of an autograd graph saved in the forward pass."""

import functools
from collections.abc import Callable, Container, Iterator
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
        _repack(saved, _forget, _refuse)


def free_unread(node: Node, edges: Container[int]) -> None:
    """Frees what ``node`` does not read if only the gradients of its next ``edges`` are still to be computed."""
    for name, reader in _READER.get(node.name(), {}).items():
        if reader not in edges:
            _repack(getattr(node, f"_raw_saved_{name}"), _outline, _as_packed)


@functools.cache
def _fields(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _repack(saved: SavedTensor, pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]) -> None:
    # Hooks on a saved tensor are the documented way to make a node let go of it; there can be one pair.
    if saved.unpack_hook is None and saved.data is not None:
        saved.register_hooks(pack, unpack)


def _forget(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise RuntimeError("this tensor was freed by backward_inputs: a graph runs backward once")


def _outline(tensor: Tensor) -> Tensor:
    return tensor.new_full((), torch.nan).expand(tensor.shape)  # NaN, to show if it is read after all


def _as_packed(outline: Tensor) -> Tensor:
    return outline
