"""What parallelize functions leave behind, and what they refuse."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import (
    GradientSync,
    ShardPolicy,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)


class SeesLocalTensors(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(self.weight, DTensor)
        assert not isinstance(self.bias, DTensor)
        if x.isnan().any():
            raise ValueError("bad input")
        return super().forward(x)


def _mesh(**degrees: int):
    return DistContext.launch(MeshConfig(**degrees), "cpu").mesh("dense")["dp_replicate"]


def _experts_mesh(**degrees: int):
    return DistContext.launch(MeshConfig(**degrees), "cpu").mesh("expert")["ep_replicate", "ep_shard", "ep"]


def _replicated() -> list[float]:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(SeesLocalTensors(3, 3), SeesLocalTensors(3, 2))
    parallelize_replicate(module, _mesh(replicate=2))
    assert all(isinstance(p, DTensor) for p in module.parameters())
    assert all(isinstance(p, DTensor) for p in module.state_dict().values())
    assert isinstance(module[0], SeesLocalTensors)
    with pytest.raises(ValueError, match="bad input"):
        module(torch.full((1, 3), torch.nan))
    x = torch.ones(1, 3)
    plain = module(x)
    recomputed = checkpoint(module, x, use_reentrant=False)
    recomputed.sum().backward()
    assert torch.equal(plain, recomputed)
    assert not isinstance(module[0].weight, DTensor)
    return plain.flatten().tolist()


def test_values_come_from_the_first_rank_and_forward_sees_local_tensors():
    first, second = run_world(2, _replicated)
    assert first == second


def _compiled() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    parallelize_replicate(module, _mesh(replicate=2))
    x = torch.randn(4, 3)
    expected = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)

    sync = GradientSync([list(module.parameters())])
    gradients = []
    for run in (module, compiled):
        with sync.microbatch(0, last=True):
            run(x).sum().backward()
        sync.finish()
        gradients.append([p.grad.full_tensor().clone() for p in module.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_compiles_to_one_graph_with_and_without_a_sync():
    run_world(2, _compiled)


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.arange(count * 2.0).view(count, 2))
        self.groups: list[list[int]] = []

    def expert_parameters(self):
        yield self.weight

    def set_expert_group(self, group, *, dispatcher=None) -> None:
        self.groups.append(dist.get_process_group_ranks(group))


def _split_experts() -> tuple[list[list[float]], list[list[int]]]:
    moe = Experts(4)
    parallelize_expert_parallel(moe, _experts_mesh(replicate=4, expert=2))
    parameter = next(moe.parameters())
    assert isinstance(parameter, DTensor)
    assert parameter.placements == (Replicate(), Replicate(), Shard(0))
    return moe.weight.tolist(), moe.groups


def test_a_rank_holds_a_contiguous_block_of_experts():
    for rank, (weights, groups) in enumerate(run_world(4, _split_experts)):
        first = 2 * (rank % 2)
        assert weights == [[2.0 * e, 2.0 * e + 1] for e in (first, first + 1)]
        assert groups == [[rank // 2 * 2, rank // 2 * 2 + 1]]


def _refusals() -> None:
    with pytest.raises(ValueError, match="2 experts do not divide over 4 expert-parallel ranks"):
        parallelize_expert_parallel(Experts(2), _experts_mesh(replicate=4, expert=4))
    dense = DistContext.launch(MeshConfig(replicate=2, shard=2), "cpu").mesh("dense")["dp_replicate", "dp_cp_shard"]
    with pytest.raises(ValueError, match="takes a mesh of one dim"):
        parallelize_fsdp(nn.Linear(2, 2), dense)
    with pytest.raises(ValueError, match="two dims, 'dp_replicate' last"):
        parallelize_hsdp(nn.Linear(2, 2), dense, shard_dim="dp_replicate")
    sharded = nn.Linear(2, 2)
    parallelize_fsdp(sharded, dense["dp_cp_shard"])
    with pytest.raises(ValueError, match="FSDPLinear is a unit of fully_shard already"):
        parallelize_fsdp(sharded, dense["dp_cp_shard"])
    with pytest.raises(ValueError, match="fully_shard sums the gradient"):
        GradientSync([list(sharded.parameters())])
    with pytest.raises(TypeError, match="Linear cannot be expert-parallel"):
        parallelize_expert_parallel(nn.Linear(2, 2), _experts_mesh(replicate=4))
    with pytest.raises(ValueError, match=r"dims \('ep_replicate', 'ep_shard', 'ep'\), got \('dp_replicate',\)"):
        parallelize_expert_parallel(Experts(4), _mesh(replicate=4))
    moe = Experts(4)
    moe.router = nn.Linear(2, 4)
    experts = DistContext.launch(MeshConfig(shard=4, expert=2), "cpu").mesh("expert")["ep_replicate", "ep_shard", "ep"]
    parallelize_expert_parallel(moe, experts)
    with pytest.raises(
        ValueError, match="router.weight, router.bias lies in .*Experts, a unit of fully_shard that does not own it"
    ):
        parallelize_fsdp(nn.Sequential(moe), dense["dp_cp_shard"])
    partly = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    parallelize_replicate(partly[0], _mesh(replicate=4))
    with pytest.raises(ValueError, match=r"those of shapes \[\(2, 3\), \(2,\)\] are not"):
        GradientSync([list(partly.parameters())])
    foreign = nn.Parameter(distribute_tensor(torch.ones(4), _mesh(replicate=4), [Replicate()]))
    with pytest.raises(ValueError, match="was not laid out by a parallelize function"):
        GradientSync([[foreign]])


def test_what_cannot_be_laid_out_is_refused():
    run_world(4, _refusals)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def _edges() -> None:
    mesh = _mesh(replicate=1)
    tied = TiedHead()
    parallelize_replicate(tied.embed, mesh)
    parallelize_replicate(tied, mesh)
    assert len(list(tied.parameters())) == 1
    assert tied.head.weight.data_ptr() == tied.embed.weight.data_ptr()

    layer = nn.Linear(2, 2)
    parallelize_replicate(layer, mesh)
    del layer.weight
    assert not hasattr(layer, "weight")
    layer.register_buffer("weight", torch.ones(2, 2))
    assert layer.weight.sum() == 4

    moe = Experts(4)
    parallelize_replicate(moe, mesh)
    with pytest.raises(ValueError, match="Experts are laid out already.*before any other"):
        parallelize_expert_parallel(moe, _experts_mesh(replicate=1))


def test_calls_in_other_orders_keep_ties_or_are_refused():
    run_world(1, _edges)


class Hides(nn.Linear):
    def forward(self, x: Tensor) -> object:
        return {"result": [slice(super().forward(x))]}


def _hidden_output() -> None:
    module, policy = Hides(2, 2), ShardPolicy(compute_dtype=None)
    mesh = DistContext.launch(MeshConfig(shard=2), "cpu").mesh("dense")["dp_cp_shard"]
    parallelize_fsdp(module, mesh, policy=policy)
    with pytest.raises(TypeError, match="FSDPHides returned a slice, in which fully_shard finds no tensors"):
        module(torch.ones(1, 2))


def test_an_output_in_which_fully_shard_finds_no_tensors_is_refused():
    run_world(2, _hidden_output)
