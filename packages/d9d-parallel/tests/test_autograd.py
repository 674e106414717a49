"""Autograd's corners with parameters that are laid out."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import GradientSync, ShardPolicy, is_fully_sharded, parallelize_fsdp, parallelize_replicate

AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


def _parallel(mesh: MeshConfig) -> TwoBranches:
    module, dense = TwoBranches(), DistContext.launch(mesh, "cpu").mesh("dense")
    if mesh.shard == 1:
        parallelize_replicate(module, dense["dp_replicate"])
    for unit in (module.first, module.second, module) if mesh.shard > 1 else ():
        parallelize_fsdp(unit, dense["dp_cp_shard"], policy=AS_STORED)
    return module


def _unused_at_first(meshes: list[MeshConfig]) -> list[dict[str, list]]:
    found = []
    for mesh in meshes:
        module, rank = _parallel(mesh), dist.get_rank()
        sync = GradientSync([[p for p in module.parameters() if not is_fully_sharded(p)]])
        for _ in range(2):  # the second step must not see the first
            module.zero_grad()
            for index, branch in enumerate(["first", "second", "first"]):
                with sync.microbatch(0, last=index == 2):
                    module(torch.full((1, 3), 10.0**index * (rank + 1)), branch).sum().backward()
            sync.finish()
        found.append({name: p.grad.full_tensor().unique().tolist() for name, p in module.named_parameters()})
    return found


def test_a_parameter_unused_in_the_first_microbatch_gets_the_gradient_of_the_second():
    """Case 14."""
    for per_mesh in run_world(2, _unused_at_first, [MeshConfig(replicate=2), MeshConfig(shard=2)]):
        for gradients in per_mesh:
            assert gradients == {"first.weight": [303.0], "second.weight": [30.0]}


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


def _anomalies(meshes: list[MeshConfig]) -> None:
    for mesh in meshes:
        module = _parallel(mesh)
        assert all(isinstance(p, DTensor) for p in module.parameters())
        sync = GradientSync([[p for p in module.parameters() if not is_fully_sharded(p)]], grad_dtype=torch.float64)
        with torch.autograd.detect_anomaly():
            with sync.microbatch(0, last=True):
                module(torch.ones(1, 3), "first").sum().backward()
            sync.finish()
            assert dict(module.named_parameters())["first.weight"].grad.full_tensor().unique().tolist() == [2.0]
            with pytest.raises(RuntimeError, match="'UndefinedBackward' returned nan"), sync.microbatch(0, last=True):
                Undefined.apply(module(torch.ones(1, 3), "first")).sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_works_with_parameters_that_are_laid_out():
    """Case 19."""
    run_world(2, _anomalies, [MeshConfig(replicate=2), MeshConfig(shard=2)])
