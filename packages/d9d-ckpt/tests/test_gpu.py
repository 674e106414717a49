"""CUDA tensors over NCCL: the same round trips as on the CPU. Runs itself under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d.ckpt import Concatenate, Identity, JobCheckpoints, Parallel, Sequential, Stack, export, load, open_checkpoint


@pytest.mark.gpu
def test_round_trips_on_cuda(tmp_path):
    ranks = min(2, torch.cuda.device_count())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*launch, __file__, tmp_path], check=True, timeout=300)


def round_trips(root: Path) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    full = {
        "gate_up": torch.randn(6, 8, 16, device=device, dtype=torch.bfloat16),
        "mask": torch.rand(5, device=device) > 0.5,
        "step": torch.tensor(3, device=device),
    }

    def placed(placement, values=full):
        return {n: distribute_tensor(t, mesh, [placement]) if t.ndim else t for n, t in values.items()}

    def check(found, placement):
        for name, tensor in placed(placement).items():
            assert torch.equal(*(t.to_local() if t.ndim else t for t in (found[name], tensor))), name

    zeros = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    mapper = Parallel(
        Identity("mask", "step"),
        Sequential(
            Concatenate(["{e}.gate", "{e}.up"], "{e}.gate_up", sizes=(4, 4)), Stack("{e}.gate_up", "gate_up", count=6)
        ),
    )
    export(placed(Shard(0)), mapper.inverse(), root / "exported", max_shard_bytes=400)
    found = placed(Shard(0), zeros)
    load(open_checkpoint(root / "exported"), mapper, found)
    check(found, Shard(0))

    checkpoints = JobCheckpoints(root / "job")
    checkpoints.save(1, placed(Shard(0)), shared={}, per_rank={"rng": torch.cuda.get_rng_state()})
    checkpoint = checkpoints.latest()
    assert checkpoint is not None
    found = placed(Replicate(), zeros)
    checkpoint.load(found)
    check(found, Replicate())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    round_trips(Path(sys.argv[1]))
