"""Collectives of picklable objects over a process group.

torch's own need numpy, which torch does not bring.
"""

import ctypes
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._bytes import all_gather_bytes, broadcast_bytes, gather_bytes
from ._group import device_of, rank_in
from ._pending import Pending

T = TypeVar("T")


def all_gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """The value of every rank, in rank order, on every rank.

    Args:
        value: Picklable; on CUDA-only groups it travels through device memory.
        group: Every rank of it must call this; ``None`` for the default one.

    Raises:
        PicklingError: On every rank, if the value of one cannot be pickled.
        ValueError: This rank is not in the group.
    """
    return all_gather_objects_async(value, group).wait()


def all_gather_objects_async(value: T, group: ProcessGroup | None = None) -> Pending[list[T]]:
    """As `all_gather_objects`; returns once sizes are exchanged, and values travel while the caller goes on."""
    rank_in(group)
    payload, sizes = _announced(value, group)
    return all_gather_bytes(payload, sizes, group=group, result=_all_unpickled)


def gather_objects(value: T, group: ProcessGroup | None = None, *, group_dst: int = 0) -> list[T] | None:
    """The value of every rank, in rank order, on one rank; ``None`` on the others.

    Args:
        value: Picklable.
        group: Every rank of it must call this; ``None`` for the default one.
        group_dst: Who gets the values, by its rank in the group.

    Raises:
        PicklingError: On every rank, if the value of one cannot be pickled.
        ValueError: This rank or the destination is not in the group.
    """
    return gather_objects_async(value, group, group_dst=group_dst).wait()


def gather_objects_async(value: T, group: ProcessGroup | None = None, *, group_dst: int = 0) -> Pending[list[T] | None]:
    """As `gather_objects`; returns once sizes are exchanged, and values travel while the caller goes on."""
    rank_in(group, group_dst)
    payload, sizes = _announced(value, group)
    return gather_bytes(payload, sizes, group=group, group_dst=group_dst, result=_all_unpickled)


def broadcast_object(value: T, group: ProcessGroup | None = None, *, group_src: int = 0) -> T:
    """The value of one rank, on every rank.

    Args:
        value: Picklable; that of other ranks than the source is not looked at.
        group: Every rank of it must call this; ``None`` for the default one.
        group_src: The source, by its rank in the group; there the value itself is returned.

    Raises:
        PicklingError: On every rank, if the value cannot be pickled.
        ValueError: This rank or the source is not in the group.
    """
    return broadcast_object_async(value, group, group_src=group_src).wait()


def broadcast_object_async(value: T, group: ProcessGroup | None = None, *, group_src: int = 0) -> Pending[T]:
    """As `broadcast_object`; returns once its size is known, and the value travels while the caller goes on."""
    is_source = rank_in(group, group_src) == group_src
    device = device_of(group)
    payload = _pickled(value, device) if is_source else None
    size = torch.tensor(_length(payload), device=device)
    dist.broadcast(size, group=group, group_src=group_src)
    length = int(size)
    if length < 0:
        raise _not_picklable([group_src]) from _cause(payload)
    assert not isinstance(payload, Exception)
    return broadcast_bytes(
        payload,
        length,
        device=device,
        group=group,
        group_src=group_src,
        result=lambda received: value if is_source else _unpickled(received),
    )


def _announced(value: object, group: ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """This rank's pickle, and the lengths of all, which say whether there is one."""
    payload = _pickled(value, device_of(group))
    size = torch.tensor([_length(payload)], device=device_of(group))
    found = size.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(found, size, group=group)
    sizes: list[int] = found.tolist()
    if failed := [rank for rank, length in enumerate(sizes) if length < 0]:
        raise _not_picklable(failed) from _cause(payload)
    assert not isinstance(payload, Exception)
    return payload, sizes


def _pickled(value: object, device: torch.device) -> Tensor | Exception:
    """A value, or why there is none: the other ranks wait to hear of it."""
    try:
        data = pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling runs the code of the value
        return error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _length(payload: Tensor | Exception | None) -> int:
    match payload:
        case Tensor():
            return payload.numel()
        case Exception():
            return -1
        case None:
            return 0


def _not_picklable(ranks: list[int]) -> pickle.PicklingError:
    return pickle.PicklingError(
        f"ranks {ranks} of the group have values that cannot be pickled; the error on such a rank says why"
    )


def _cause(payload: Tensor | Exception | None) -> Exception | None:
    return payload if isinstance(payload, Exception) else None


def _all_unpickled(found: list[Tensor]) -> list[Any]:
    return [_unpickled(payload) for payload in found]


def _unpickled(payload: Tensor) -> Any:
    payload = payload.cpu()
    return pickle.loads(ctypes.string_at(payload.data_ptr(), payload.numel()))  # noqa: S301 - from our own ranks
