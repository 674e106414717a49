"""One rank of `test_pipeline_gpu`, under torchrun: stages that are replicated or sharded besides, over NCCL."""

import os

from test_pipeline_laid_out import assert_not_of_the_error, gradients_after_an_error
from test_pipeline_replicas import train_all

from d9d.mesh import DistContext, MeshConfig

world = int(os.environ["WORLD_SIZE"])
pipeline = 2 if world > 2 else 1
with DistContext.launch(MeshConfig(pipeline=pipeline, replicate=-1), "cuda") as context:
    for kind, max_unsharded in (("replicate", None), ("shard", None), ("shard", 1)):
        ran = train_all(MeshConfig(pipeline=pipeline, **{kind: world // pipeline}), max_unsharded, "cuda")
        if context.is_main:
            print(kind, max_unsharded, *ran, flush=True)  # noqa: T201
    if world == 2:
        assert_not_of_the_error(gradients_after_an_error("cuda"))
