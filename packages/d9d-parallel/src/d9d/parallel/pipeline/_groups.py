"""Process groups that only some ranks need, and that all have to make."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from d9d.mesh import all_gather_objects


def groups_of_job(wanted: Iterable[tuple[int, ...]], **options: Any) -> dict[tuple[int, ...], ProcessGroup]:
    """One group for each set of ranks that any rank of the job wants; every rank of the job must call this.

    torch splits groups off the job's communicator, so that all take part in all of them, in one order. Its
    ``use_local_synchronization`` neither does that nor gives a group one name on all of its ranks where they have made
    different numbers of groups before.

    Args:
        wanted: By this rank; global ranks.
        **options: Of `torch.distributed.new_group`, the same on every rank.

    Returns:
        Those that this rank is in.
    """
    union = sorted({ranks for of_rank in all_gather_objects(list(wanted)) for ranks in of_rank})
    made = {ranks: dist.new_group(list(ranks), **options) for ranks in union}
    return {ranks: group for ranks, group in made.items() if isinstance(group, ProcessGroup)}
