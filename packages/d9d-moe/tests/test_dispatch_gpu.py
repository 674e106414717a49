"""Dispatch over NCCL."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_spread_over_gpus_equal_all_of_them_on_one(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"takes {ranks} GPUs")
    script = Path(__file__).with_name("nccl_dispatch.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*launch, str(script)], check=True, timeout=300)
