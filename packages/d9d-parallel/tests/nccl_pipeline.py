"""One rank of `test_pipeline_gpu`, under torchrun: a pipeline over NCCL against one process on the same GPU."""

import os

import torch
from test_pipeline_executor import (
    Expected,
    all_schedules,
    assert_gradients,
    batch_of,
    loss_of,
    stages_of,
    train_under,
)

from d9d.mesh import DistContext, MeshConfig
from d9d.parallel import global_norm
from d9d.parallel.pipeline._executor import Executor

world = int(os.environ["WORLD_SIZE"])
with DistContext.launch(MeshConfig(pipeline=world), "cuda") as context:
    group = context.mesh("dense").get_group("pp")
    for schedule in all_schedules():
        assert train_under(schedule, group, (1, 2, 3, 4, 8, 16), "cuda")
        stages = stages_of(schedule, world, context.rank, "cuda")
        executor = Executor(stages, schedule, group)
        inputs, shared = batch_of(8, "cuda")
        executor.step(inputs, shared, loss_of)  # allocates
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        executor.step(inputs, shared, loss_of)
        torch.cuda.set_sync_debug_mode("default")
        assert_gradients(stages, Expected.of(world * schedule.stages_per_rank, 8, "cuda"), f"{schedule}", times=2)
        # A rank whose stages have nothing to count reduces where the others do.
        counted = [p for stage in stages.values() for p in stage.parameters() if context.is_main]
        norm = global_norm(counted, pp_group=group)
        assert norm.is_cuda
        assert norm > 0
        if context.is_main:
            print(schedule.kind, "is right", flush=True)  # noqa: T201
