"""Collectives of byte strings whose lengths differ between ranks and are known to all of them.

Bytes, since a backend takes some dtypes only; of one length, since gloo takes no other.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._pending import Pending

T = TypeVar("T")

# No backend has to carry nothing, and the parts of a buffer can be seen as any dtype.
_SMALLEST = 16


def all_gather_bytes(
    payload: Tensor, sizes: Sequence[int], *, group: ProcessGroup | None, result: Callable[[list[Tensor]], T]
) -> Pending[T]:
    """The payload of every rank, in rank order.

    Args:
        payload: Of this rank, flat uint8.
        sizes: Lengths of the payloads of all ranks.
        group: Where to gather.
        result: Makes the result of the payloads.
    """
    padded = _padded(payload, max(sizes))
    found = padded.new_empty(len(sizes) * padded.numel())
    work = dist.all_gather_into_tensor(found, padded, group=group, async_op=True)
    assert work is not None
    return Pending(work, lambda: result(_parts(found, sizes)), sent=padded)


def gather_bytes(
    payload: Tensor,
    sizes: Sequence[int],
    *,
    group: ProcessGroup | None,
    group_dst: int,
    result: Callable[[list[Tensor]], T],
) -> Pending[T | None]:
    """As `all_gather_bytes`, on one rank; ``None`` on the others."""
    padded = _padded(payload, max(sizes))
    if dist.get_rank(group) != group_dst:
        work = dist.gather(padded, group=group, group_dst=group_dst, async_op=True)
        assert work is not None
        return Pending(work, lambda: None, sent=padded)
    found = padded.new_empty(len(sizes) * padded.numel())
    work = dist.gather(padded, list(found.chunk(len(sizes))), group=group, group_dst=group_dst, async_op=True)
    assert work is not None
    return Pending(work, lambda: result(_parts(found, sizes)), sent=padded)


def broadcast_bytes(
    payload: Tensor | None,
    size: int,
    *,
    device: torch.device,
    group: ProcessGroup | None,
    group_src: int,
    result: Callable[[Tensor], T],
) -> Pending[T]:
    """The payload of one rank, on every rank.

    Args:
        payload: On the source, flat uint8.
        size: Its length.
        device: Where the others receive it.
        group: Where to broadcast.
        group_src: The source.
        result: Makes the result of the payload.
    """
    buffer = torch.empty(max(size, _SMALLEST), dtype=torch.uint8, device=device)
    if payload is not None:
        buffer[:size] = payload
    work = dist.broadcast(buffer, group=group, group_src=group_src, async_op=True)
    assert work is not None
    return Pending(work, lambda: result(buffer[:size]), sent=buffer)


def _padded(payload: Tensor, size: int) -> Tensor:
    padded = payload.new_empty(max(size, _SMALLEST))
    padded[: payload.numel()] = payload
    return padded


def _parts(found: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [part[:size] for part, size in zip(found.chunk(len(sizes)), sizes)]
