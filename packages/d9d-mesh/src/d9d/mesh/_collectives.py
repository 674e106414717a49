"""Collectives over a process group for what torch's tensor collectives do not take: objects and ragged tensors.

All take a `ProcessGroup` of torch, ``None`` meaning the default one, and must be called by every rank of it.
"""

import ctypes
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The picklable ``value`` of every rank, in rank order, on every rank."""
    padded, sizes = _padded_bytes(value, group)
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [_decode(t[:size]) for t, size in zip(found, sizes)]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """The picklable ``value`` of every rank on the group's first rank; ``None`` on the others."""
    padded, sizes = _padded_bytes(value, group)
    if dist.get_rank(group) != 0:
        dist.gather(padded, group=group, group_dst=0)
        return None
    found = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, found, group=group, group_dst=0)
    return [_decode(t[:size]) for t, size in zip(found, sizes)]


def broadcast_object(value: T, group: dist.ProcessGroup | None = None) -> T:
    """The picklable ``value`` of the group's first rank, on every rank."""
    is_first = dist.get_rank(group) == 0
    payload = _encode(value, group) if is_first else None
    size = torch.tensor([0 if payload is None else payload.numel()], device=_device(group))
    dist.broadcast(size, group=group, group_src=0)
    if payload is None:
        payload = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.broadcast(payload, group=group, group_src=0)
    return value if is_first else _decode(payload)


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


# torch's own collectives of objects need numpy, which torch does not bring.
def _padded_bytes(value: object, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """This rank's pickle, as long as the longest of the group, and the lengths of all."""
    payload = _encode(value, group)
    size = torch.tensor([payload.numel()], device=payload.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(s) for s in sizes]
    padded = payload.new_zeros(max(lengths))
    padded[: payload.numel()] = payload
    return padded, lengths


def _encode(value: object, group: dist.ProcessGroup | None) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_device(group))


def _decode(payload: Tensor) -> Any:
    payload = payload.cpu().contiguous()
    return pickle.loads(ctypes.string_at(payload.data_ptr(), payload.numel()))  # noqa: S301 - from our own ranks


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a group takes tensors: on the CPU if it can."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
