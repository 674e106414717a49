"""Initial weights under different layouts."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig, materialize
from d9d.mesh.testing import run_world


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleDict({"0": nn.Linear(6, 6), "1": nn.Linear(6, 6)})
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def _tied_on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.state_dict().items()
    }


def _single(seed: int) -> dict[str, torch.Tensor]:
    module = _tied_on_meta()
    materialize(module, device=torch.device("cpu"), seed=seed)
    assert module.head.weight is module.embed.weight
    return _weights(module)


def test_depends_on_the_seed_and_the_name_only():
    torch.manual_seed(1)
    first = _single(0)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = _single(0)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed.weight"], _single(1)["embed.weight"])
    assert not torch.equal(first["blocks.0.weight"], first["blocks.1.weight"])


def test_a_part_of_the_model_gets_the_weights_of_the_whole():
    whole, part = _single(0), _tied_on_meta()
    del part.blocks["0"]
    materialize(part, device=torch.device("cpu"), seed=0)
    assert torch.equal(part.blocks["1"].weight, whole["blocks.1.weight"])


def _sharded() -> dict[str, torch.Tensor]:
    mesh = DistContext.launch(MeshConfig(shard=4), "cpu").mesh("dense")["dp_cp_shard"]
    module = _tied_on_meta()
    for owner in [module.embed, *module.blocks.values()]:
        owner.weight = nn.Parameter(distribute_tensor(owner.weight, mesh, [Shard(0)]))
    module.head.weight = module.embed.weight
    module.blocks["0"].weight.marked = True  # attributes of a parameter stay
    materialize(module, device=torch.device("cpu"), seed=0)
    assert module.head.weight is module.embed.weight
    assert module.blocks["0"].weight.marked
    assert module.embed.weight.to_local().untyped_storage().nbytes() <= 3 * 6 * 4
    return _weights(module)


def test_shards_uneven_ones_too_are_those_of_the_whole():
    whole = _single(0)
    for weights in run_world(4, _sharded):
        assert all(torch.equal(weights[name], whole[name]) for name in whole)


def test_a_module_that_cannot_initialize_itself_is_refused_before_anything_changes():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, device="meta"))

    module = nn.Sequential(nn.Linear(2, 2, device="meta"), Bare())
    with pytest.raises(TypeError, match=r"cannot initialize 1 \(Bare\).*reset_parameters"):
        materialize(module, device=torch.device("cpu"), seed=0)
    assert module[0].weight.is_meta


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("also", self.count, persistent=False)

    def reset_parameters(self) -> None:
        self.count.fill_(7)


def test_a_buffer_of_several_names_stays_one():
    with torch.device("meta"):
        module = nn.ModuleList([TwoNames(), TwoNames()])
        module[1].count = module[0].count
    materialize(module, device=torch.device("cpu"), seed=0)
    assert module[0].also is module[0].count is module[1].count
    assert module[0].count.tolist() == [7, 7, 7]
    assert list(module.state_dict()) == ["0.count", "1.count"]
