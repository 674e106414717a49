"""Microbatch loops of unequal length and content, and how they end when one rank fails."""

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig, all_gather_objects
from d9d.mesh.testing import run_job, run_world
from d9d.parallel import (
    GradientSync,
    ShardPolicy,
    global_norm,
    is_fully_sharded,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    scale_and_clip_,
)

AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)
LAYOUTS = {
    2: [MeshConfig(replicate=2), MeshConfig(shard=2)],
    4: [MeshConfig(replicate=4), MeshConfig(shard=4), MeshConfig(replicate=2, shard=2)],
}


class Branches(nn.Module):
    """Two layers, of which each input takes those it names."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3, dtype=torch.float64) for name in ("first", "second")})
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, x: Tensor, used: tuple[str, ...]) -> Tensor:
        for name in used:
            x = self.layers[name](x).tanh()
        return x


def _laid_out(config: MeshConfig) -> tuple[Branches, GradientSync]:
    dense = DistContext.launch(config, "cpu").mesh("dense")["dp_replicate", "dp_cp_shard"]
    model = Branches()
    for unit in (*model.layers.values(), model):
        if config.shard > 1 and config.replicate > 1:
            parallelize_hsdp(unit, dense, shard_dim="dp_cp_shard", policy=AS_STORED)
        elif config.shard > 1:
            parallelize_fsdp(unit, dense["dp_cp_shard"], policy=AS_STORED)
    if config.shard == 1:
        parallelize_replicate(model, dense)
    rest = [p for p in model.parameters() if not is_fully_sharded(p)]
    return model, GradientSync([rest], grad_dtype=torch.float64)


def _batches(count: int, ranks: int) -> list[list[Tensor]]:
    """For each rank and microbatch so many samples of 3 numbers, their number differing."""
    generator = torch.Generator().manual_seed(6)
    return [
        [torch.randn(1 + (rank + 2 * i) % 3, 3, generator=generator, dtype=torch.float64) for i in range(count)]
        for rank in range(ranks)
    ]


@attrs.frozen
class Trained:
    norms: list[float]
    weights: list[int]
    rates: list[float]
    parameters: dict[str, Tensor]


def _uses(i: int) -> tuple[str, ...]:
    """The second layer is unused in the first microbatch of a step, and used in the others."""
    return ("first",) if i % 4 == 0 else ("first", "second")


def _train(config: MeshConfig) -> Trained:
    """10 batches, accumulation of 4."""
    model, sync = _laid_out(config)
    batches = _batches(10, dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trained = Trained([], [], [], {})
    for start in range(0, len(batches), 4):
        step = batches[start : start + 4]
        model.zero_grad()
        weight = torch.zeros((), dtype=torch.int64)
        for i, x in enumerate(step):
            with sync.microbatch(0, last=i == len(step) - 1):
                model(x, _uses(i)).square().sum().backward()
            weight += len(x)
        sync.finish()
        dist.all_reduce(weight)
        norm = global_norm(model.parameters())
        scale_and_clip_(model.named_parameters(), weight=weight, norm=norm, max_norm=None)
        trained.norms.append(norm.item())
        trained.weights.append(int(weight))
        trained.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    trained.parameters.update({name: p.detach().full_tensor() for name, p in model.named_parameters()})
    return trained


def _reference(ranks: int) -> Trained:
    """Plain autograd of the mean over all samples of a step."""
    model = Branches()
    batches = _batches(10, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trained = Trained([], [], [], {})
    for number, start in enumerate((0, 4, 8)):
        samples = [(x, _uses(i)) for rank in batches for i, x in enumerate(rank[start : start + 4])]
        weight = sum(len(x) for x, _ in samples)
        optimizer.zero_grad()
        (sum(model(x, used).square().sum() for x, used in samples) / weight).backward()
        trained.norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item() * weight)
        trained.weights.append(weight)
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + number)
        trained.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    trained.parameters.update({name: p.detach() for name, p in model.named_parameters()})
    return trained


def _train_all(configs: list[MeshConfig]) -> list[Trained]:
    return [_train(config) for config in configs]


@pytest.mark.parametrize("world", [2, 4])
def test_10_batches_by_4_are_3_steps_each_divided_by_what_it_holds(world):
    """Cases 5 and 14."""
    expected = _reference(world)
    for found in run_world(world, _train_all, LAYOUTS[world]):
        for trained in found:
            assert trained.weights == expected.weights
            assert trained.rates == expected.rates == [0.5, 0.25, 0.5 / 3]
            assert trained.norms == pytest.approx(expected.norms, rel=1e-12)
            for name, parameter in trained.parameters.items():
                torch.testing.assert_close(parameter, expected.parameters[name], rtol=1e-11, atol=1e-14, msg=name)


def _fail(where: str) -> None:
    """One rank fails where the others wait for its part of a unit of `fully_shard`."""
    with DistContext.launch(MeshConfig(shard=-1), "cpu") as context:
        model = Branches()
        for unit in (*model.layers.values(), model):
            parallelize_fsdp(unit, context.mesh("dense")["dp_cp_shard"], policy=AS_STORED)
        all_gather_objects(context.rank)

        def fail(*_: object) -> None:
            raise ArithmeticError(f"broken {where} on rank {context.rank}")

        if context.rank == 1 and where == "forward":
            model.layers["second"].forward = fail
        elif context.rank == 1:
            model.layers["first"].register_full_backward_hook(fail)
        for _ in range(3):
            model(torch.ones(2, 3, dtype=torch.float64, requires_grad=True), ("first", "second")).sum().backward()


@pytest.mark.parametrize("where", ["forward", "hook"])
def test_a_rank_that_fails_between_the_collectives_of_fully_shard_ends_all_with_its_traceback(where):
    """Case 45."""
    ranks = run_job(2, _fail, where)
    assert all(ended.exit_code for ended in ranks), ranks
    assert all(f"ArithmeticError: broken {where} on rank 1" in ended.output for ended in ranks), ranks
