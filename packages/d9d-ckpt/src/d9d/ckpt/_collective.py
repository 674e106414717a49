"""The few collectives that checkpoints need; without a process group, a world of one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another rank of a collective operation failed; the message holds its error."""


def rank_of(group: ProcessGroup | None) -> int:
    """This rank in `group`, by default the default group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def all_gather(value: T, group: ProcessGroup | None) -> list[T]:
    """Every rank's value, in order of ranks."""
    if size_of(group) == 1:
        return [value]
    gathered: list[Any] = [None] * size_of(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def agree(failure: Exception | None, group: ProcessGroup | None) -> None:
    """Raises on all ranks if any rank brings a failure: its own where it has one, else a `PeerError`."""
    texts = all_gather(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    failed = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise PeerError("\n".join(failed))


@contextmanager
def together(group: ProcessGroup | None) -> Generator[None]:
    """Runs a block without collectives on all ranks: if it raises on one, it raises on all."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # raised again by agree
        failure = error
    agree(failure, group)
