"""What CUDA and NCCL add to a pipeline: streams, and communicators that must not wait for each other."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run_script(name: str, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"takes {world} GPUs")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    subprocess.run([*launch, str(Path(__file__).with_name(name))], check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_gives_loss_and_gradients_of_one_process_and_the_host_never_waits(world):
    run_script("nccl_pipeline.py", world)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_trains_replicated_and_sharded_stages(world):
    run_script("nccl_pipeline_replicas.py", world)
