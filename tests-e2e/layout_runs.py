"""Runs of the example that tests compare: under torchrun, those that are pickled in a file, to files beside it."""

import os
import pickle
import sys
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d.loop.config import load
from d9d.mesh import DistContext, MeshConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "qwen3_moe"))
import pretrain

GLOBAL_BATCH = 8


@attrs.frozen
class Run:
    losses: list[float]
    labels: list[list[int]]  # of each rank's microbatches in each step
    expert_loads: Tensor  # (steps, layers, experts), int64, over all ranks
    weights: dict[str, Tensor]  # of this rank's stages


def base_config(script: Path, arguments: list[str], *, steps: int) -> pretrain.PretrainConfig:
    """In fp64, with a learning rate that changes something in few steps."""
    more = ["--trainer.dtype", "float64", "--trainer.steps", str(steps), "--trainer.optimizer.lr", "1e-2"]
    return load(pretrain.PretrainConfig, script.with_name("small.toml"), [*arguments, *more])


def configs_of(
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


def train_all(configs: list[pretrain.PretrainConfig], files: list[bytes]) -> list[Run]:
    return [_train(config, files) for config in configs]


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
        expert_loads = torch.stack(loads).to(ctx.device)
        dist.all_reduce(expert_loads)
        weights = {name: _whole(parameter).cpu() for name, parameter in trainer.named_parameters().items()}
        return Run(losses, labels, expert_loads.cpu(), weights)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


if __name__ == "__main__":
    from layout_runs import train_all as train_all_of_module  # whose runs the test can read

    asked = Path(sys.argv[1])
    made = train_all_of_module(*pickle.loads(asked.read_bytes()))
    asked.with_name(f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(made))
