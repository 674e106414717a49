"""What a collective asks of its process group."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def rank_in(group: ProcessGroup | None, other: int = 0) -> int:
    """This rank's index in a group.

    Args:
        group: ``None`` for the default one.
        other: A rank that the caller means to name, by its index in the group.

    Raises:
        ValueError: This rank is not in the group, or the other is not.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} calls a collective of a group that it is not in")
    size = dist.get_world_size(group)
    if not 0 <= other < size:
        raise ValueError(f"rank {other!r} is not in a group of {size}: ranks are counted within the group")
    return rank


def device_of(group: ProcessGroup | None) -> torch.device:
    """Where a group takes tensors: on the CPU if it can."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
