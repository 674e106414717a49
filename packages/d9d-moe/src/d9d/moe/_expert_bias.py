"""Balance without a loss: a bias on each expert's score, moved against its load (arXiv:2408.15664)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ._load import routers, sum_over_ranks


@torch.no_grad()
def update_expert_bias(modules: Iterable[nn.Module], group: dist.ProcessGroup | None, *, rate: float = 1e-3) -> None:
    """Raise the bias of experts that had less than the mean load, lower that of those that had more; zero the load.

    Call it once a step, before the optimizer's, on every rank of the group. Routers without ``expert_bias`` are left
    alone, their load too. The step's microbatches all see the old bias, and so does their recompute.

    Args:
        modules: Routers, or modules that contain them; the same on every rank.
        group: Ranks that route different tokens with the same routers: data, context and tensor ranks, not stages of a
            pipeline. None is this rank alone.
        rate: Size of a step.

    Raises:
        ValueError: A bias is narrower than fp32, as ``load_state_dict(assign=True)`` can make it: steps vanish in it.
    """
    found = {id(router): router for module in modules for _, router in routers(module)}
    biased = [(router, router.expert_bias) for router in found.values() if router.expert_bias is not None]
    for _, bias in biased:
        if bias.dtype.itemsize < torch.float32.itemsize:
            raise ValueError(f"expert_bias must be fp32 or wider, found {bias.dtype!r}; load it without assign=True")
    loads = sum_over_ranks([router.expert_load for router, _ in biased], group)
    for (router, bias), load in zip(biased, loads):
        # In whole numbers: the mean load may be a fraction.
        bias.add_((load.sum() - load * len(load)).sign(), alpha=rate)
        router.expert_load.zero_()
