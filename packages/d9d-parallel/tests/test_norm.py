"""Norm and clipping over mixed layouts."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import global_norm, scale_and_clip_

SHAPES = {"replicated": (5, 3), "uneven": (5, 2), "empty_on_some": (3,), "both_dims": (6, 8), "plain": (7,)}


def _gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def _with_gradient(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


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


@pytest.mark.parametrize(
    ("weight", "max_norm", "expected"),
    [
        (2, None, [1.5, 2.0]),  # the mean
        (2, 10.0, [1.5, 2.0]),  # its norm is 2.5
        (2, 0.5, [0.3, 0.4]),
        (2, 0.0, [0.0, 0.0]),
        (0, 1.0, [0.0, 0.0]),
        (0, None, [0.0, 0.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clips_the_norm_of_the_mean(weight, max_norm, expected, dtype):
    parameter = _with_gradient(torch.tensor([3.0, 4.0], dtype=dtype))
    norm = global_norm([parameter])
    scale_and_clip_([parameter], weight=torch.tensor(weight), norm=norm, max_norm=max_norm)
    assert parameter.grad.dtype == dtype
    torch.testing.assert_close(parameter.grad, torch.tensor(expected, dtype=dtype))


def test_zero_gradients_stay_zero():
    parameter = _with_gradient(torch.zeros(2))
    scale_and_clip_([parameter], weight=torch.tensor(3), norm=global_norm([parameter]), max_norm=0.0)
    assert parameter.grad.tolist() == [0.0, 0.0]


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(1000, generator=generator).bfloat16() for _ in range(5)]
    parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    expected = torch.cat(gradients).double().norm().item()
    assert global_norm(parameters).item() == pytest.approx(expected, rel=1e-6)
