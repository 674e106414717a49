"""The few collectives that checkpoints need; without a process group, a world of one."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._memory import memory_of

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
    # torch's collective of objects needs numpy, which torch does not bring
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = [int(length) for length in _gather_tensors(torch.tensor([len(mine)]), group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = mine
    pickled = [data[:length] for data, length in zip(_gather_tensors(padded, group), lengths)]
    return [pickle.loads(memory_of(data)) for data in pickled]  # noqa: S301  # of a rank of this job


def _gather_tensors(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensor, which all have the same shape and are on the CPU, in order of ranks."""
    sent = tensor.to(_device_of(group))
    gathered = [torch.empty_like(sent) for _ in range(size_of(group))]
    dist.all_gather(gathered, sent, group)
    return [each.cpu() for each in gathered]


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Where a group takes tensors: on the CPU if it can."""
    cpu = "cpu:" in dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())


def agree(failure: Exception | None, group: ProcessGroup | None) -> None:
    """Raises on all ranks if any rank brings a failure: its own where it has one, else a `PeerError`."""
    texts = all_gather(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    failed = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise PeerError("\n".join(failed))


def require_alike(lines: Sequence[str], group: ProcessGroup | None) -> None:
    """Raises a ValueError on all ranks, with the first line that differs, if they do not mean to write the same."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    if len(set(all_gather(digest, group))) == 1:
        return
    first, *others = all_gather(list(lines), group)
    for rank, theirs in enumerate(others, start=1):
        for expected, found in itertools.zip_longest(first, theirs, fillvalue="nothing more"):
            if expected != found:
                raise ValueError(
                    "ranks would write different things, give all the same mapper and options:\n"
                    f"  rank 0 {expected}\n  rank {rank} {found}"
                )


@contextmanager
def together(group: ProcessGroup | None) -> Generator[None]:
    """Runs a block without collectives on all ranks: if it raises on one, it raises on all."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # raised again by agree
        failure = error
    agree(failure, group)
