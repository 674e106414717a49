"""Norms over mixed layouts."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import ShardPolicy, global_norm, group_norms, parallelize_expert_parallel, total_norm

SHAPES = {"replicated": (5, 3), "uneven": (5, 2), "empty_on_some": (3,), "both_dims": (6, 8), "plain": (7,)}


def _gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def _with_gradient(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


class CountCollectives(TorchDispatchMode):
    """As torch's CommDebugMode, which takes numpy on torch 2.11."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in {"c10d", "_c10d_functional"}
        return func(*args, **(kwargs or {}))


def _collectives(norm, parameters) -> int:
    with CountCollectives() as counted:
        norm(parameters)
    return counted.count


def _norms_with(bad: float, parameters: list[nn.Parameter], types: list[float]) -> list[float]:
    """With one bad element, which one rank alone holds."""
    gradient = next(p for p in parameters if p.grad is not None and p.shape == SHAPES["both_dims"]).grad.to_local()
    before = gradient.clone()
    if dist.get_rank() == 3:
        gradient[-1, -1] = bad
    norms = [global_norm(parameters, norm_type=t).item() for t in types]
    gradient.copy_(before)
    return norms


def _norms(types: list[float]) -> list[float]:
    mesh = DistContext.launch(MeshConfig(replicate=2, shard=2), "cpu").mesh("dense")["dp_replicate", "dp_cp_shard"]
    placements = {
        "replicated": [Replicate(), Replicate()],
        "uneven": [Replicate(), Shard(0)],
        "empty_on_some": [Shard(0), Shard(0)],
        "both_dims": [Shard(1), Shard(0)],
    }
    gradients = _gradients()
    parameters = [_with_gradient(distribute_tensor(gradients[n], mesh, p)) for n, p in placements.items()]
    parameters.append(_with_gradient(gradients["plain"]))
    parameters.append(nn.Parameter(torch.zeros(3, dtype=torch.float64)))  # has no gradient
    norms = [global_norm(parameters, norm_type=t).item() for t in types]
    groups = {"first": parameters[:2], "none": [], "rest": parameters[2:]}
    for norm_type, norm in zip(types, norms):
        by_group = group_norms(groups, norm_type=norm_type)
        assert list(by_group) == list(groups)
        assert by_group["none"] == 0
        assert by_group["first"].item() == pytest.approx(global_norm(parameters[:2], norm_type=norm_type).item())
        assert total_norm(by_group.values(), norm_type=norm_type).item() == pytest.approx(norm, rel=1e-14)
    assert _collectives(group_norms, groups) == _collectives(global_norm, parameters) == 3
    for bad in (math.nan, math.inf):
        assert not any(math.isfinite(norm) for norm in _norms_with(bad, parameters, types))
    partial = _with_gradient(gradients["plain"])
    partial.grad = None
    summed = distribute_tensor(gradients["plain"], mesh, [Replicate(), Replicate()])
    partial = nn.Parameter(summed)
    partial.grad = type(summed).from_local(summed.to_local(), mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="not summed"):
        global_norm([partial])
    return norms


def test_shards_on_any_dims_count_once():
    """Case 11, and types of case 12."""
    types = [1.0, 2.0, 3.5, math.inf]
    whole = torch.cat([g.flatten() for g in _gradients().values()])
    expected = [torch.linalg.vector_norm(whole, t).item() for t in types]
    for norms in run_world(4, _norms, types):
        assert norms == pytest.approx(expected, rel=1e-12)


class Experts(nn.Module):
    """So odd on dim 1 that ep_shard has to split dim 0 once more."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, 3, 2, dtype=torch.float64))

    def expert_parameters(self):
        yield self.weight

    def set_expert_group(self, group, *, dispatcher=None) -> None:
        pass


def _strided(counts: list[int], types: list[float]) -> list[tuple[list[float], list[float]]]:
    mesh = DistContext.launch(MeshConfig(shard=4, expert=2), "cpu").mesh("expert")["ep_replicate", "ep_shard", "ep"]
    found = []
    for count in counts:
        experts = Experts(count)
        whole = experts.weight.detach().clone()
        parallelize_expert_parallel(experts, mesh, policy=ShardPolicy(compute_dtype=None, reduce_dtype=None))
        (parameter,) = experts.parameters()
        assert [type(p).__name__ for p in parameter.placements] == ["_StridedShard", "Shard"]
        parameter.grad = parameter.detach().clone()
        found.append(
            (
                [global_norm([parameter], norm_type=t).item() for t in types],
                [torch.linalg.vector_norm(whole, t).item() for t in types],
            )
        )
    return found


def test_experts_split_twice_on_one_dim_count_once():
    """Case 11, evenly, unevenly, and with ranks that hold none."""
    for cases in run_world(4, _strided, [4, 6, 2], [1.0, 2.0, math.inf]):
        for found, expected in cases:
            assert found == pytest.approx(expected, rel=1e-12)


def _two_stages(norm_type: float) -> float:
    """One stage has experts split over ranks, the other has nothing with a gradient; a tied weight counts once."""
    stages = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    shared = _with_gradient(torch.full((2,), 3.0))
    if stages.get_local_rank("pp") == 0:
        experts = _with_gradient(distribute_tensor(torch.arange(4.0), stages["ep"], [Shard(0)]))
        return global_norm([experts, shared], norm_type=norm_type, pp_group=stages.get_group("pp")).item()
    frozen = nn.Parameter(torch.ones(3))
    pp_group = stages.get_group("pp")
    return global_norm([frozen, shared], norm_type=norm_type, pp_group=pp_group, tied=[shared]).item()


def test_stages_that_hold_different_tensors_agree():
    """Cases 9, 10 and 12."""
    assert run_world(4, _two_stages, 2.0) == pytest.approx([math.sqrt(0 + 1 + 4 + 9 + 9 + 9)] * 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad, norm_type):
    parameters = [_with_gradient(torch.tensor([1.0, bad])), _with_gradient(torch.ones(2))]
    assert not math.isfinite(global_norm(parameters, norm_type=norm_type).item())


def test_no_gradients_have_norm_zero():
    assert global_norm([nn.Parameter(torch.ones(2))]).item() == 0
    with pytest.raises(ValueError, match="positive p"):
        global_norm([], norm_type=0.0)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(1000, generator=generator).bfloat16() for _ in range(5)]
    parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    expected = torch.cat(gradients).double().norm().item()
    assert global_norm(parameters).item() == pytest.approx(expected, rel=1e-6)
