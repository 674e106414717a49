"""A split vocabulary over NCCL, and on one GPU by two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "ranks", "gpus"), [("nccl", 1, 1), ("gloo", 2, 1), ("nccl", 2, 2), ("nccl", 4, 4)])
def test_a_split_vocabulary_gives_loss_and_gradients_of_the_whole(backend, ranks, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"takes {gpus} GPUs")
    script = Path(__file__).with_name("nccl_vocabulary.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*launch, str(script), backend], check=True, timeout=300)
