"""What a user brings to a certificate: a model, its layout, its loss, and a loop written by hand."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from summing_collectives import Gather, Sum
from torch import Tensor, nn

from d9d.mesh import DistContext
from d9d.parallel import (
    LossSum,
    ShardPolicy,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)
from d9d.parallel.certify import StepResult

VOCABULARY, WIDTH, EXPERTS = 11, 6, 4
AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)


class Experts(nn.Module):
    """Every expert sees every token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.group = EXPERTS, None
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def expert_parameters(self):
        yield self.weight

    def set_expert_group(self, group, *, dispatcher=None) -> None:
        self.group = group

    def held(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        if self.group is None:
            return torch.einsum("te,th,ehg->tg", share, x, self.weight).tanh()
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        x, share = (Gather.apply(t, self.group) for t in (x, share))
        y = torch.einsum("te,th,ehg->tg", share.chunk(size, -1)[rank], x, self.held())
        return Sum.apply(y, self.group).chunk(size)[rank].tanh()


class Tied(nn.Module):
    experts_class = Experts

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = self.experts_class()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        return self.head(x + self.experts(x))


def lay_out(module: Tied, context: DistContext) -> None:
    config = context.config
    if config.pipeline * config.context * config.tensor > 1:
        raise ValueError("laid out over replicate, shard and expert only")
    if config.expert > 1:
        experts = context.mesh("expert")["ep_replicate", "ep_shard", "ep"]
        parallelize_expert_parallel(module.experts, experts, policy=AS_STORED if config.shard > 1 else None)
    dense = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
    if config.shard == 1:
        parallelize_replicate(module, dense)
        return
    # The router would else be a part of the experts' unit, which does not take it.
    for unit in [module.experts.router, [module.embed, module.head], module]:
        if config.replicate == 1:
            parallelize_fsdp(unit, dense["dp_cp_shard"], policy=AS_STORED)
        else:
            parallelize_hsdp(unit, dense, shard_dim="dp_cp_shard", policy=AS_STORED)


def loss_sum(module: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    ids, labels = batch
    total = F.cross_entropy(module(ids), labels.flatten(), ignore_index=-100, reduction="sum")
    return LossSum(total, (labels != -100).sum())


def split(batch: tuple[Tensor, Tensor], index: int, count: int) -> tuple[Tensor, Tensor]:
    return tuple(tensor.tensor_split(count)[index] for tensor in batch)


def make_batch(valid=(1, 5, 3, 2, 4, 0, 5, 1)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(VOCABULARY, (2, len(valid), 5), generator=generator)
    for row, count in enumerate(valid):
        labels[row, count:] = -100
    return ids, labels


def sound(**changes):
    """The arguments of `certify`, with one thing changed."""
    return {"model": Tied, "parallelize": lay_out, "loss": loss_sum, "split": split, "batch": make_batch(), **changes}


def leave_plain(module: nn.Module, context: DistContext) -> None:
    assert context.config.replicate == context.world_size


def by_hand(module, loss, optimizer, context, *, reduced=slice(None), zeroes=True, norm_over_ranks=False, average=1):
    """Replicas of plain tensors, summed in two buckets: nothing of this package."""
    parameters = list(module.parameters())
    buckets = [parameters[:2], parameters[2:]]

    def step(microbatches, *, max_norm):
        if zeroes:
            module.zero_grad()
        total = torch.zeros(2, dtype=torch.float64)
        for microbatch in microbatches:
            found = loss(module, microbatch)
            found.sum.backward()
            total += torch.stack([found.sum.detach(), found.weight.double()])
        dist.all_reduce(total)
        for bucket in buckets[reduced]:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat)
            for parameter, gradient in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad.copy_(gradient.view_as(parameter) / average)
        norm_squared = sum((p.grad / total[1]).square().sum() for p in parameters)
        if norm_over_ranks:
            dist.all_reduce(norm_squared)
        norm = norm_squared.sqrt()
        for parameter in parameters:
            parameter.grad *= (1.0 if max_norm is None else min(1.0, max_norm / norm)) / total[1]
        optimizer.step()
        return StepResult(total=LossSum(*total.unbind()), norm=norm)

    return step


def by_hand_case(**changes):
    return sound(**{"parallelize": leave_plain, "loop": by_hand, **changes})
