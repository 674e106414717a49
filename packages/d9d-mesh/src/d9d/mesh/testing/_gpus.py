"""A script on CUDA ranks, of which there may be more than GPUs."""

import subprocess
import sys
from pathlib import Path

import torch


def run_on_gpus(script: str | Path, *arguments: str, ranks: int, timeout: float = 300.0) -> None:
    """Run a script under torchrun on this host, one process a rank.

    Where there are fewer GPUs than ranks, ranks share them, over NCCL too, which then goes slowly, through sockets:
    that shows whether a program is right, not how fast it is.

    Args:
        script: Takes its device from ``LOCAL_RANK``, as `d9d.mesh.DistContext.launch` does.
        *arguments: What it gets on its command line.
        ranks: Number of processes.
        timeout: Seconds.

    Raises:
        RuntimeError: There is no GPU.
        subprocess.CalledProcessError: A rank failed; what ranks wrote is in the output of this process.
        subprocess.TimeoutExpired: A rank was still running after ``timeout``.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        raise RuntimeError(f"there is no GPU to run {script} on")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    rank = ["-m", "d9d.mesh.testing.gpu_rank", str(gpus)]
    subprocess.run([*launch, *rank, str(script), *arguments], check=True, timeout=timeout)
