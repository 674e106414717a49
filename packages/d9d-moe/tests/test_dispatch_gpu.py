"""Dispatch over NCCL, and on one GPU by several ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "ranks", "gpus"), [("nccl", 1, 1), ("gloo", 2, 1), ("gloo", 4, 1), ("nccl", 2, 2), ("nccl", 4, 4)]
)
def test_experts_spread_over_ranks_equal_all_of_them_on_one(backend, ranks, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"takes {gpus} GPUs")
    script = Path(__file__).with_name("dispatch_on_gpus.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*launch, str(script), backend], check=True, timeout=300)
