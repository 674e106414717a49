"""Collectives whose gradients are summed over the ranks, for models of tests that share tokens."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Gather(torch.autograd.Function):
    """All ranks' rows, one after the other."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        total = Sum.apply(gradient, ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Sum(torch.autograd.Function):
    """Of all ranks' addends."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return Sum.apply(gradient, ctx.group), None
