"""What CUDA and NCCL add to a pipeline: streams, and communicators that must not wait for each other."""

from pathlib import Path

import pytest

from d9d.mesh.testing import run_on_gpus

SCRIPTS = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_gives_loss_and_gradients_of_one_process_and_the_host_never_waits(world):
    run_on_gpus(SCRIPTS / "nccl_pipeline.py", ranks=world)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_trains_replicated_and_sharded_stages(world):
    run_on_gpus(SCRIPTS / "nccl_pipeline_replicas.py", ranks=world)
