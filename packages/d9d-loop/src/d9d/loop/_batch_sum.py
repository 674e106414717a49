"""Sums over the ranks that hold different data, or other parts of the model."""

import torch
import torch.distributed as dist
from torch import Tensor

from d9d.mesh import DistContext
from d9d.parallel import LossSum


def sum_over_batch(tensor: Tensor, ctx: DistContext) -> Tensor:
    """The sum over the dims pp, dp and cp of the mesh "batch", never over tp, whose ranks hold the same data.

    What belongs to the model's output is on the ranks of the last stage, and zero on the others of a pipeline.

    Args:
        tensor: Left as it is.
        ctx: Of this rank; every rank must call this.
    """
    mesh = ctx.mesh("batch")
    total = tensor.to(ctx.device, copy=True)
    for dim in ("pp", "dp", "cp"):
        group = mesh.get_group(dim)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
    return total


def sum_losses(losses: list[LossSum], ctx: DistContext) -> LossSum:
    """The total, without a graph, of microbatches and ranks: one fp64 collective a dim, exact for weights to 2⁵³."""
    local = torch.stack([torch.stack([loss.sum.detach().double(), loss.weight.double()]) for loss in losses]).sum(0)
    value, weight = sum_over_batch(local, ctx)
    return LossSum(sum=value, weight=weight)
