"""Clipping, the one division, and gradients that are not finite."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import global_norm, scale_and_clip_


def _with_gradient(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


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


def _broken(mesh) -> dict[str, nn.Parameter]:
    """Parameters with a NaN and an infinity, on one rank each."""
    sharded = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Replicate(), Shard(0)])
    split = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1), Shard(0)])
    if mesh.get_local_rank("dp_cp_shard") == 1:
        sharded.to_local()[0, 0] = math.nan
    if dist.get_rank() == 2:
        split.to_local()[0] = -math.inf
    whole = distribute_tensor(torch.ones(3), mesh, [Replicate(), Replicate()])
    found = {name: _with_gradient(value) for name, value in {"a": sharded, "b": whole, "c.weight": split}.items()}
    return found | {"unused": nn.Parameter(torch.zeros_like(whole))}


def _each_choice(norm_type: float) -> list[str]:
    mesh = DistContext.launch(MeshConfig(replicate=2, shard=2), "cpu").mesh("dense")["dp_replicate", "dp_cp_shard"]
    keywords = {"weight": torch.tensor(2), "max_norm": 1.0}
    said = []
    for parameters in (list(_broken(mesh).items()), list(_broken(mesh).values())):
        norm = global_norm(parameters, norm_type=norm_type)
        with pytest.raises(FloatingPointError) as caught:
            scale_and_clip_(parameters, norm=norm, **keywords)
        said.append(str(caught.value))

    skipped = _broken(mesh)
    norm = global_norm(skipped.values(), norm_type=norm_type)
    assert not scale_and_clip_(skipped.items(), norm=norm, **keywords, nonfinite="skip")
    assert all(p.grad is None for p in skipped.values())

    zeroed = _broken(mesh)
    norm = global_norm(zeroed.values(), norm_type=norm_type)
    assert scale_and_clip_(zeroed.values(), norm=norm, **keywords, nonfinite="zero")
    assert zeroed.pop("unused").grad is None
    assert all(not p.grad.to_local().count_nonzero() for p in zeroed.values())

    for nonfinite in ("raise", "skip", "zero"):
        good = _with_gradient(torch.tensor([3.0, 4.0]))
        norm = global_norm([good], norm_type=norm_type)
        assert scale_and_clip_([good], weight=torch.tensor(2), norm=norm, max_norm=None, nonfinite=nonfinite)
        assert good.grad.tolist() == [1.5, 2.0]
    return said


def _each_choice_of_each_norm() -> list[list[str]]:
    return [_each_choice(norm_type) for norm_type in (1.0, 2.0, math.inf)]


def test_every_rank_takes_a_bad_element_of_one_rank_alike():
    """Case 12: raised and named everywhere, skipped everywhere, or zeroed everywhere."""
    ranks = run_world(4, _each_choice_of_each_norm)
    assert all(said == ranks[0] for said in ranks)
    for norm, (with_names, without) in zip(("nan", "nan", "inf"), ranks[0]):
        assert with_names.startswith(
            f"the norm of the gradients is {norm}, from 'a' of shape (5, 2) (1 NaN and 0 infinite of 10 elements); "
            "'c.weight' of shape (4, 4) (0 NaN and 2 infinite of 16 elements). The step was not made"
        )
        assert "from parameter 0 of shape (5, 2)" in without
        assert "parameter 2 of shape (4, 4)" in without


def test_a_model_that_diverged_is_not_listed_whole():
    parameters = [_with_gradient(torch.full((2,), math.nan)) for _ in range(20)]
    norm = global_norm(parameters)
    with pytest.raises(FloatingPointError, match=r"parameter 7 of shape \(2,\) \([^;]*; and 12 more\. The step"):
        scale_and_clip_(parameters, weight=torch.tensor(1), norm=norm, max_norm=None)


def test_a_norm_that_another_stage_spoilt_is_said_to_be_so():
    parameter = _with_gradient(torch.ones(2))
    with pytest.raises(FloatingPointError, match="is nan, from no gradient of this stage, so in another stage"):
        scale_and_clip_([parameter], weight=torch.tensor(1), norm=torch.tensor(math.nan), max_norm=None)
    assert parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.gpu
def test_zeroing_does_not_wait_for_the_device():
    parameters = [_with_gradient(torch.tensor([1.0, bad], device="cuda")) for bad in (2.0, math.nan)]
    weight = torch.tensor(2, device="cuda")
    for norm_type in (1.0, 2.0, math.inf):
        assert not global_norm(parameters, norm_type=norm_type).isfinite()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = global_norm(parameters)
        scale_and_clip_(parameters, weight=weight, norm=norm, max_norm=1.0, nonfinite="zero")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad.tolist() == [0.0, 0.0] for p in parameters)
