"""Collectives over a process group for what torch's tensor collectives do not take: objects and ragged tensors.

All take a `ProcessGroup` of torch, ``None`` meaning the default one, and must be called by every rank of it.
"""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The picklable ``value`` of every rank, in rank order, on every rank."""
    found: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """The picklable ``value`` of every rank on the group's first rank; ``None`` on the others."""
    is_first = dist.get_rank(group) == 0
    found: list[T] | None = [value] * dist.get_world_size(group) if is_first else None
    dist.gather_object(value, found, group=group, group_dst=0)
    return found


def broadcast_object(value: T, group: dist.ProcessGroup | None = None) -> T:
    """The picklable ``value`` of the group's first rank, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def all_gather_ragged(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Tensors that differ in the size of dim 0, one a rank, in rank order, on every rank.

    Args:
        tensor: This rank's tensor, of any size of dim 0 (zero too), on the group's device; its other dims and its
            dtype are those of the other ranks.
        group: Where to gather.

    Raises:
        ValueError: On every rank, if a tensor has no dims, or dtypes or sizes of the other dims differ between ranks.
    """
    headers = all_gather_objects((tensor.dtype, tuple(tensor.shape)), group)
    if () in {shape for _, shape in headers} or len({(dtype, shape[1:]) for dtype, shape in headers}) > 1:
        raise ValueError(
            f"a ragged gather takes tensors that have a dim 0 and differ in no other, and the ranks hold {headers}"
        )
    longest = max(shape[0] for _, shape in headers)
    padded = tensor.new_empty((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    # all_gather of equal sizes: gloo and NCCL both take it, uneven ones only NCCL does.
    found = [torch.empty_like(padded) for _ in headers]
    dist.all_gather(found, padded, group=group)
    return [t[: shape[0]] for t, (_, shape) in zip(found, headers)]
