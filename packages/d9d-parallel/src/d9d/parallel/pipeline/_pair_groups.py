"""A process group for each channel of a pipeline."""

import weakref
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ._groups import groups_of_job

Pair = tuple[int, int]

_made: weakref.WeakKeyDictionary[ProcessGroup, dict[Pair, ProcessGroup]] = weakref.WeakKeyDictionary()
"""By pipeline: executors share channels, as each communicator holds device memory."""


def pair_groups(group: ProcessGroup, pairs: Iterable[Pair], device: torch.device) -> Mapping[Pair, ProcessGroup]:
    """Connected groups, one for each channel of this rank; every rank of the job must call this.

    Args:
        group: The pipeline's ranks.
        pairs: Source and destination of each channel, as ranks of ``group``; the same on every rank of it.
        device: Of this rank; NCCL connects those of CUDA, gloo others.
    """
    mine = _made.setdefault(group, {})
    ranks = dist.get_process_group_ranks(group)
    missing = [pair for pair in set(pairs) - mine.keys() if dist.get_rank(group) in pair]
    made = groups_of_job(
        [(ranks[source], ranks[destination]) for source, destination in missing],
        backend="nccl" if device.type == "cuda" else "gloo",
    )
    for (source, destination), channel in sorted(made.items()):
        _connect(channel, source, destination, device)
        mine[ranks.index(source), ranks.index(destination)] = channel
    return mine


def _connect(group: ProcessGroup, source: int, destination: int, device: torch.device) -> None:
    """Exchange a byte: a communicator that comes up with its first message makes the host wait for the other end."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        dist.send(byte, destination, group=group)
    else:
        dist.recv(byte, source, group=group)
