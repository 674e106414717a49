"""The example computes the same run in every layout: losses, routing and weights of 50 steps in fp64."""

from pathlib import Path

import attrs
import pretrain
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d.loop.config import load
from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world

STEPS = 50
GLOBAL_BATCH = 8
BOTH_WAYS = [MeshConfig(replicate=4, expert=expert) for expert in (1, 2, 4)]
ACCUMULATED = [MeshConfig(shard=4, expert=2), MeshConfig(pipeline=2, replicate=2, expert=2)]


@attrs.frozen
class Run:
    losses: list[float]
    labels: list[list[int]]  # of each rank's microbatches in each step
    expert_loads: Tensor  # (steps, layers, experts), int64, over all ranks
    weights: dict[str, Tensor]  # of this rank's stages


def _train(config: pretrain.PretrainConfig, files: list[bytes]) -> Run:
    with DistContext.launch(config.mesh, config.device) as ctx:
        trainer = pretrain.build_trainer(config, files, ctx)
        losses, labels, loads = [], [], []
        for step in range(config.trainer.steps):
            labels.append([int((batch[1] >= 0).sum()) for batch in trainer.batches.step(step)])
            losses.append(trainer.train_step().total.mean().item())
            loads.append(torch.zeros(config.model.num_layers, config.model.num_experts, dtype=torch.int64))
            for stage in trainer.stages.values():
                for number, layer in stage.layers.items():
                    loads[-1][int(number)] = layer.moe.expert_load
                    layer.moe.expert_load.zero_()
        expert_loads = torch.stack(loads)
        dist.all_reduce(expert_loads)
        return Run(losses, labels, expert_loads, {name: _whole(p) for name, p in trainer.named_parameters().items()})


def _train_all(configs: list[pretrain.PretrainConfig], files: list[bytes]) -> list[Run]:
    return [_train(config, files) for config in configs]


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _configs(
    base: pretrain.PretrainConfig, meshes: list[MeshConfig], accumulations: tuple[int, ...]
) -> list[pretrain.PretrainConfig]:
    """Each layout with each accumulation."""
    return [
        attrs.evolve(
            base,
            mesh=mesh,
            trainer=attrs.evolve(
                base.trainer, microbatch=GLOBAL_BATCH // (mesh.replicate * mesh.shard) // accumulation
            ),
        )
        for mesh in meshes
        for accumulation in accumulations
    ]


def test_every_layout_gives_the_run_of_one_process(script: Path, tiny, files):
    arguments = [*tiny, "--trainer.dtype", "float64", "--trainer.steps", str(STEPS), "--trainer.optimizer.lr", "1e-2"]
    base = load(pretrain.PretrainConfig, script.with_name("small.toml"), arguments)
    alone = _configs(base, [MeshConfig()], (1, 2))
    layouts = [*_configs(base, BOTH_WAYS, (1, 2)), *_configs(base, ACCUMULATED, (2,))]
    [[expected, accumulated]] = run_world(1, _train_all, alone, files, timeout=300.0)
    on_ranks = run_world(4, _train_all, layouts, files, timeout=300.0)

    # it is a run worth comparing: it learns, every expert has work, and ranks have unequal numbers of labels
    assert expected.losses[-1] < 0.6 * expected.losses[0]
    assert (expected.expert_loads.sum(0) > 0).all()
    per_rank = [[sum(step) for step in runs[0].labels] for runs in on_ranks]
    assert sum(len(set(counts)) > 1 for counts in zip(*per_rank)) > STEPS / 2

    for run in [accumulated, *(run for runs in on_ranks for run in runs)]:
        torch.testing.assert_close(run.losses, expected.losses, rtol=1e-9, atol=0)
        # the number of tokens of each expert of each layer at each step: what a flipped choice would change
        assert torch.equal(run.expert_loads, expected.expert_loads)
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-9, atol=1e-12)
    for runs in zip(*on_ranks):
        assert {name for run in runs for name in run.weights} == expected.weights.keys()
