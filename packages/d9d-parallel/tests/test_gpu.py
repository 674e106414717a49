"""What CUDA and NCCL add: streams, and collectives that run beside backward."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAYOUTS = {
    1: ["replicate=1", "shard=1"],
    2: ["replicate=2", "shard=2", "replicate=2,expert=2", "shard=2,expert=2"],
    4: ["replicate=4,expert=2", "replicate=2,shard=2", "replicate=2,shard=2,expert=4", "shard=4,expert=2"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_gives_the_update_of_one_process(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"takes {world} GPUs")
    script = Path(__file__).with_name("nccl_steps.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    subprocess.run([*launch, str(script), *LAYOUTS[world]], check=True, timeout=300)
