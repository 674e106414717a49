"""A process group for each channel of a pipeline."""

import weakref
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from d9d.mesh import all_gather_objects

Pair = tuple[int, int]

_made: weakref.WeakKeyDictionary[ProcessGroup, dict[Pair, ProcessGroup]] = weakref.WeakKeyDictionary()
"""By pipeline: executors share channels, as each communicator holds device memory."""


def pair_groups(group: ProcessGroup, pairs: Iterable[Pair], device: torch.device) -> Mapping[Pair, ProcessGroup]:
    """Connected groups, one for each channel of this rank.

    Every rank of the job makes the groups of every pipeline, in one order, since torch splits them off the job's
    communicator. (Its ``use_local_synchronization`` neither does that nor gives a group one name on both ranks when
    they have made different numbers of groups before.)

    Args:
        group: The pipeline's ranks.
        pairs: Source and destination of each channel, as ranks of ``group``; the same on every rank of it.
        device: Of this rank; NCCL connects those of CUDA, gloo others.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    mine = _made.setdefault(group, {})
    ranks = dist.get_process_group_ranks(group)
    missing = sorted(pair for pair in set(pairs) - mine.keys() if dist.get_rank(group) in pair)
    wanted = all_gather_objects([(ranks[source], ranks[destination]) for source, destination in missing])
    for source, destination in sorted({pair for pairs_of_rank in wanted for pair in pairs_of_rank}):
        made = dist.new_group([source, destination], backend=backend, group_desc=f"pipeline {source} to {destination}")
        if isinstance(made, ProcessGroup):  # this rank is one of the two
            _connect(made, source, destination, device)
            mine[ranks.index(source), ranks.index(destination)] = made
    return mine


def _connect(group: ProcessGroup, source: int, destination: int, device: torch.device) -> None:
    """Exchange a byte: a communicator that comes up with its first message makes the host wait for the other end."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        dist.send(byte, destination, group=group)
    else:
        dist.recv(byte, source, group=group)
