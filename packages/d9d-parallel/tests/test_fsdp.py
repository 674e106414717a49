"""What parallelize_fsdp and parallelize_hsdp add to `fully_shard`."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.mesh import DistContext, MeshConfig, materialize
from d9d.mesh.testing import run_world
from d9d.parallel import ShardPolicy, parallelize_fsdp, parallelize_hsdp, prefetch, sharded_microbatch

AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)


class Weights(nn.Module):
    """Gives weights times a number, so that each weight's gradient is that number; not all are always used."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Parameter(torch.ones(5, 3))
        self.sometimes = nn.Parameter(torch.ones(2, 2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty_on_some = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, factor: float, *, everything: bool) -> Tensor:
        used = [self.uneven, self.frozen, self.empty_on_some] + [self.sometimes] * everything
        return torch.cat([weight.flatten() * factor for weight in used]).sum()


def _sums_of_bf16_shards(config: MeshConfig) -> dict[str, tuple[torch.dtype, list[float]]]:
    dense = DistContext.launch(config, "cpu").mesh("dense")["dp_replicate", "dp_cp_shard"]
    with torch.device("meta"):
        module = Weights().to(torch.bfloat16)
    if config.replicate > 1:
        parallelize_hsdp(module, dense, shard_dim="dp_cp_shard")
    else:
        parallelize_fsdp(module, dense["dp_cp_shard"])
    materialize(module, device=torch.device("cpu"), seed=0)
    for step in range(2):  # the second must not see the first
        module.zero_grad()
        for i in range(20):
            # In bf16, 4096 + 1 is 4096.
            module(4096.0 if i == 0 else 1.0, everything=i % 2 == step).backward()
    return {
        name: (parameter.grad.dtype, parameter.grad.full_tensor().unique().tolist())
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize(("world", "config"), [(2, MeshConfig(shard=2)), (4, MeshConfig(replicate=2, shard=2))])
def test_gradients_of_bf16_shards_lose_nothing_to_bf16(world, config):
    """Cases 4 and 14."""
    whole = world * (4096.0 + 19.0)
    for gradients in run_world(world, _sums_of_bf16_shards, config):
        assert gradients == {
            "uneven": (torch.float32, [whole]),
            "sometimes": (torch.float32, [world * 10.0]),
            "empty_on_some": (torch.float32, [whole]),
        }


class CountGathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


def _gathers(kinds: list[str]) -> list[tuple[int, list[float]]]:
    mesh = DistContext.launch(MeshConfig(shard=2), "cpu").mesh("dense")["dp_cp_shard"]
    results = []
    for kind in kinds:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))
        policy = ShardPolicy(compute_dtype=None, reduce_dtype=None, gathered_for=kind)
        for unit in (*module, module):
            parallelize_fsdp(unit, mesh, policy=policy)
        prefetch(list(module))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = torch.full((2, 4), dist.get_rank() + 1.0, dtype=torch.float64)
        losses = []
        with CountGathers() as gathers:
            for _ in range(2):
                for i in range(3):
                    with sharded_microbatch(module, last=i == 2):
                        loss = module(x * (i + 1)).square().sum()
                        loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        results.append((gathers.count, losses))
    return results


def test_units_are_gathered_as_often_as_the_policy_says_and_updates_are_seen():
    """3 units, 3 microbatches, 2 steps; the outermost module has no parameters of its own."""
    for per_pass, per_microbatch, per_step in run_world(2, _gathers, ["pass", "microbatch", "step"]):
        assert [per_pass[0], per_microbatch[0], per_step[0]] == [2 * 18, 18, 6]
        assert per_pass[1] == per_microbatch[1] == per_step[1]


def _failing_then_good() -> list[list[float]]:
    mesh = DistContext.launch(MeshConfig(shard=2), "cpu").mesh("dense")["dp_cp_shard"]
    results = []
    for kind in ("pass", "step"):
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        nn.init.ones_(module[0].weight)
        nn.init.ones_(module[1].weight)
        policy = ShardPolicy(compute_dtype=None, gathered_for=kind)
        for unit in (*module, module):
            parallelize_fsdp(unit, mesh, policy=policy)
        with sharded_microbatch(module, last=False):
            module(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="shapes"), sharded_microbatch(module, last=True):
            module(torch.ones(1, 3))
        module.zero_grad()
        with sharded_microbatch(module, last=True):
            module(torch.ones(1, 4)).sum().backward()
        weight = module[1].weight
        assert isinstance(weight, DTensor)
        results.append(weight.grad.full_tensor().flatten().tolist())
    return results


def test_a_step_after_a_failed_one_is_right():
    """Case 46."""
    assert run_world(2, _failing_then_good) == [[[8.0] * 4] * 2] * 2


def test_only_units_can_be_gathered_ahead():
    with pytest.raises(ValueError, match=r"\['Linear'\] are no units of fully_shard"):
        prefetch([nn.Linear(1, 1)])
