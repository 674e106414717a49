"""Every schedule over stages that are replicated or sharded besides, against plain autograd; fp64."""

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import LossSum, ShardPolicy, parallelize_fsdp, parallelize_replicate
from d9d.parallel.pipeline._executor import Executor
from d9d.parallel.pipeline._laid_out import sync_stages
from d9d.parallel.pipeline._schedule import Schedule

MICROBATCHES = 3
AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None, gathered_for="step")


class Block(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.up = nn.Linear(4, 6, dtype=torch.float64)
        self.down = nn.Linear(6, 4, dtype=torch.float64)

        self.recomputes = False

    def forward(self, x, shared):
        return checkpoint(self.grown, x, use_reentrant=False) if self.recomputes else self.grown(x)

    def grown(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def loss_of(x, shared) -> LossSum:
    return LossSum(x.square().sum(), torch.tensor(len(x)))


def expected_gradients(count: int, microbatches) -> list[dict[str, torch.Tensor]]:
    blocks = [Block(stage) for stage in range(count)]
    for microbatch in microbatches:
        x = microbatch
        for block in blocks:
            x = block(x, None)
        loss_of(x, None).sum.backward()
    return [{name: p.grad for name, p in block.named_parameters()} for block in blocks]


def train_all(config: MeshConfig, max_unsharded: int | None, device: str = "cpu") -> list[str]:
    context = DistContext.launch(config, device)
    dense, batch_mesh = context.mesh("dense"), context.mesh("batch")
    pp, dp = dense.get_local_rank("pp"), batch_mesh.get_local_rank("dp")
    generator = torch.Generator().manual_seed(0)
    count = batch_mesh["dp"].size() * MICROBATCHES
    batch = [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(count)]
    mine = [microbatch.to(device) for microbatch in batch[dp * MICROBATCHES : (dp + 1) * MICROBATCHES]]
    ran = []
    for kind, make in sorted(Schedule.kinds().items()):
        schedule = make(stages_per_rank=2) if "stages_per_rank" in attrs.fields_dict(make) else make()
        program = schedule.program(ranks=config.pipeline, microbatches=MICROBATCHES)
        if not program.is_training:
            continue
        stages = {stage: Block(stage).to(device) for stage in program.stages_of(pp)}
        for block in stages.values():
            block.recomputes = max_unsharded is not None  # so that each pass reads the weights
            if config.shard > 1:
                parallelize_fsdp(block, dense["dp_cp_shard"], policy=AS_STORED)
            else:
                parallelize_replicate(block, dense["dp_replicate"])
        sync, runtimes = sync_stages(stages, splits_backward=program.splits_backward)
        executor = Executor(stages, schedule, dense.get_group("pp"), runtimes=runtimes, max_unsharded=max_unsharded)
        expected = expected_gradients(program.stages, batch)
        for _ in range(2):  # the second step must not see the first
            executor.step(mine, [None] * MICROBATCHES, loss_of)
            if config.shard == 1:
                sync.finish()
            for stage, block in stages.items():
                for name, parameter in block.named_parameters():
                    assert isinstance(parameter.grad, DTensor)
                    found = parameter.grad.full_tensor().cpu()
                    what = f"{kind}, stage {stage}, {name}"
                    torch.testing.assert_close(found, expected[stage][name], rtol=1e-11, atol=1e-13, msg=what)
            for block in stages.values():
                block.zero_grad()
        ran.append(kind)
    return ran


@pytest.mark.parametrize(
    ("config", "max_unsharded"),
    [
        (MeshConfig(pipeline=2, replicate=2), None),
        (MeshConfig(pipeline=2, shard=2), None),
        (MeshConfig(pipeline=2, shard=2), 1),  # a stage is gathered several times in a step
    ],
)
def test_every_schedule_trains_replicated_and_sharded_stages(config, max_unsharded):
    for ran in run_world(4, train_all, config, max_unsharded):
        assert {"1f1b", "zb-h1", "zbv", "dualpipev"} <= set(ran)
