"""Loads of experts over ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._router import TopKRouter


@torch.no_grad()
def sum_expert_loads(module: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum the load of every router within a module over the ranks of a group, in one collective.

    Args:
        module: Has the same routers on every rank of the group.
        group: Ranks that route different tokens; None is this rank alone.

    Returns:
        int64 (num_experts,) by the router's name within ``module``. The routers' own counters stay as they are.
    """
    loads = {name: router.expert_load for name, router in routers(module)}
    return dict(zip(loads, sum_over_ranks(list(loads.values()), group)))


def routers(module: nn.Module) -> Iterator[tuple[str, TopKRouter]]:
    """Routers within a module, by name."""
    for name, part in module.named_modules():
        if isinstance(part, TopKRouter):
            yield name, part


def sum_over_ranks(loads: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Sum each over the ranks, in one collective; the loads themselves stay as they are."""
    if not loads:
        return []
    total = torch.cat(loads)
    if group is not None:
        dist.all_reduce(total, group=group)
    return list(total.split([len(load) for load in loads]))
