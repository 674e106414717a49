"""Stages laid out by this package, driven as the executor drives them."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig, materialize
from d9d.mesh.testing import run_world
from d9d.parallel import (
    GradientSync,
    ShardPolicy,
    is_fully_sharded,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)
from d9d.parallel.pipeline._laid_out import LaidOutStage

MICROBATCHES, WIDTH = 3, 6


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def inputs() -> Tensor:
    return torch.randn(8 * MICROBATCHES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def built() -> Stage:
    with torch.device("meta"):
        return Stage().to(torch.float64)


def lay_out(stage: Stage, context: DistContext, policy: ShardPolicy) -> None:
    config, dense = context.config, context.mesh("dense")["dp_replicate", "dp_cp_shard"]
    if config.shard == 1:
        parallelize_replicate(stage, dense)
        return
    for unit in ([stage.first, stage.last], stage):
        if config.replicate > 1:
            parallelize_hsdp(unit, dense, shard_dim="dp_cp_shard", policy=policy)
        else:
            parallelize_fsdp(unit, dense["dp_cp_shard"], policy=policy)


def run_step(runtime: LaidOutStage, stage: Stage, x: Tensor, *, split: bool) -> list[Tensor]:
    """All forwards, then all input gradients, then all weight gradients, or whole backwards."""
    found = []
    if runtime.is_sharded:
        runtime.unshard()
    leaves = [part.clone().requires_grad_() for part in x.chunk(MICROBATCHES)]
    losses = [stage(leaf).square().sum() for leaf in leaves]
    if split:
        found = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss, leaf in zip(losses, leaves)]
    for index, (loss, leaf) in enumerate(zip(losses, leaves)):
        with runtime.weight_gradients(last=index == MICROBATCHES - 1):
            # Every leaf but the input: gathered parameters, or what GradientSync put in a parameter's place.
            loss.backward()
        if not split:
            found.append(leaf.grad)
    runtime.reduce_gradients()
    if runtime.is_sharded:
        runtime.reshard()
    return found


def full_gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.grad.full_tensor()


def run_layouts(meshes) -> list:
    results = []
    for config, split in itertools.product(meshes, (False, True)):
        with DistContext.launch(config, "cpu") as context:
            stage = built()
            lay_out(stage, context, ShardPolicy(compute_dtype=None, reduce_dtype=None, gathered_for="step"))
            materialize(stage, device=context.device, seed=0)
            sync = GradientSync([[p for p in stage.parameters() if not is_fully_sharded(p)]], grad_dtype=torch.float64)
            runtime = LaidOutStage(stage, sync, 0, splits_backward=split)
            dp = context.mesh("batch")["dp"]
            mine = inputs().chunk(dp.size())[dp.get_local_rank()]
            for _ in range(2):  # the second step must not see the first
                stage.zero_grad()
                found = run_step(runtime, stage, mine, split=split)
                sync.finish()
            gradients = {name: full_gradient(parameter) for name, parameter in stage.named_parameters()}
            results.append((config, dp.get_local_rank(), dp.size(), torch.cat(found), gradients))
    return results


@pytest.mark.parametrize(
    ("world", "meshes"),
    [
        (2, [(2, 1), (1, 2)]),
        (4, [(2, 2)]),
    ],
)
def test_gradients_of_a_step_are_those_of_one_process(world, meshes):
    stage = built()
    materialize(stage, device=torch.device("cpu"), seed=0)
    x = inputs().requires_grad_()
    stage(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in stage.named_parameters()}
    configs = [MeshConfig(replicate=r, shard=s) for r, s in meshes]
    for results in run_world(world, run_layouts, configs, timeout=200.0):
        for config, rank, ranks, of_inputs, gradients in results:
            torch.testing.assert_close(of_inputs, x.grad.chunk(ranks)[rank], rtol=1e-11, atol=1e-15, msg=str(config))
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-15, msg=f"{config} {name}")


def refused() -> str:
    with DistContext.launch(MeshConfig(shard=1), "cpu") as context:
        stage = nn.Linear(2, 2)
        parallelize_fsdp(stage, context.mesh("dense")["dp_cp_shard"])
        with pytest.raises(ValueError, match="gathered_for") as raised:
            LaidOutStage(stage, GradientSync([[]]), 0, splits_backward=True)
        return str(raised.value)


def test_units_that_are_freed_between_the_passes_are_refused():
    assert "FSDPLinear would be freed" in run_world(1, refused)[0]


def tiny_gradients() -> Tensor:
    with DistContext.launch(MeshConfig(shard=2), "cpu") as context:
        stage = nn.Linear(1, 4, bias=False, dtype=torch.bfloat16)
        torch.nn.init.ones_(stage.weight)
        parallelize_fsdp(stage, context.mesh("dense")["dp_cp_shard"], policy=ShardPolicy(gathered_for="step"))
        runtime = LaidOutStage(stage, GradientSync([[]]), 0, splits_backward=True)
        runtime.unshard()
        for index in range(512):
            with runtime.weight_gradients(last=index == 511):
                (stage(torch.ones(1, 1, dtype=torch.bfloat16)).float().sum() * 2.0**-10).backward()
        runtime.reduce_gradients()
        runtime.reshard()
        return full_gradient(stage.weight)


def test_hundreds_of_tiny_microbatches_lose_nothing_to_bf16():
    """Case 4."""
    for gradient in run_world(2, tiny_gradients):
        assert torch.equal(gradient, torch.full((4, 1), 2 * 512 * 2.0**-10))


def gradients_after_an_error(device: str) -> list[Tensor]:
    found = []
    with DistContext.launch(MeshConfig(shard=2), device) as context:
        for is_split in (False, True):
            stage = nn.Linear(2, 2, bias=False, dtype=torch.float64, device=device)
            torch.nn.init.ones_(stage.weight)
            policy = ShardPolicy(compute_dtype=None, reduce_dtype=None, gathered_for="step")
            parallelize_fsdp(stage, context.mesh("dense")["dp_cp_shard"], policy=policy)
            runtime = LaidOutStage(stage, GradientSync([[]]), 0, splits_backward=is_split)
            x = torch.ones(MICROBATCHES, 2, dtype=torch.float64, device=device, requires_grad=True)
            runtime.unshard()
            y = stage(x)
            y.grad_fn.register_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
            runtime.abandon()
            run_step(runtime, stage, x.detach(), split=is_split)
            found.append(full_gradient(stage.weight).cpu())
    return found


def assert_not_of_the_error(found: list[Tensor]) -> None:
    for gradient in found:
        torch.testing.assert_close(gradient, torch.full((2, 2), 8.0 * MICROBATCHES, dtype=torch.float64))


def test_a_step_after_an_error_in_backward_is_good():
    """Case 46."""
    for found in run_world(2, gradients_after_an_error, "cpu"):
        assert_not_of_the_error(found)
