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

from d9d.ckpt import (
    Apply,
    Cast,
    Concatenate,
    Identity,
    JobCheckpoints,
    Parallel,
    Region,
    Sequential,
    Stack,
    Transpose,
    export,
    load,
    open_checkpoint,
)
from d9d.ckpt._collective import _gather_tensors


@pytest.mark.gpu
def test_round_trips_on_cuda(tmp_path):
    ranks = min(2, torch.cuda.device_count())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*launch, __file__, tmp_path], check=True, timeout=300)


@pytest.mark.gpu
def test_what_ranks_tell_each_other_goes_over_nccl_alone():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sent = torch.arange(17, dtype=torch.uint8)
        (found,) = _gather_tensors(sent, None)  # of one rank, `all_gather` sends nothing
    finally:
        dist.destroy_process_group()
    assert not found.is_cuda
    assert torch.equal(found, sent)


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1 << 12, 4 << 20])
def test_every_way_of_reading_ends_on_the_gpu(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("d9d.ckpt._hands.PIECE", piece)
    monkeypatch.setattr("d9d.ckpt._stream.PIECE", piece)
    tensors = {
        "a": torch.randn(600, 70).bfloat16(),
        "b": torch.rand(1001) > 0.5,
        "f8": torch.randn(64, 3).to(torch.float8_e4m3fn),
        "big": torch.randn(1 << 20),
        "0": torch.tensor(3),
        "none": torch.zeros(0, 3),
        "spread": torch.randn(50, 40),
        **{f"e.{i}": torch.randn(33, 20) for i in range(3)},
        "whole": torch.randn(5, 7),
    }
    export(tensors, Identity(), tmp_path / "written")
    mapper = Parallel(
        Transpose("a", "at"),
        Cast("big", "half", dtype=torch.bfloat16),
        Stack("e.{i}", "e", count=3, dim=1),
        Identity("b", "f8", "0", "none", "spread"),
        Apply(["whole"], ["doubled"], lambda tensor: [tensor * 2], specs=lambda spec: [spec]),
    )
    with torch.no_grad():
        expected = mapper.apply(tensors)
    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for name, tensor in expected.items()}
    state["spread"] = torch.empty(50, 80, device="cuda")[:, ::2]
    torch.cuda._sleep(10_000_000)  # what is still to be done to the tensors comes first
    for tensor in state.values():
        tensor.zero_()
    told = []
    load(open_checkpoint(tmp_path / "written"), mapper, state, progress=lambda *args: told.append(args))
    for name, tensor in expected.items():
        assert state[name].is_cuda
        assert torch.equal(state[name].cpu().float(), tensor.float()), name
    assert told[-1] == (sum(tensor.nbytes for tensor in tensors.values()),) * 2

    checkpoints = JobCheckpoints(tmp_path / "job")
    checkpoints.save(1, state, shared={}, per_rank={})
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoints.latest().load(back)
    assert all(torch.equal(back[name].float(), state[name].float()) for name in state)
    export(state, Identity(), tmp_path / "exported", max_shard_bytes=1 << 20, dtype=torch.float16)
    found = open_checkpoint(tmp_path / "exported")
    for name, tensor in expected.items():
        wide = tensor.is_floating_point() and tensor.element_size() > 1
        read = found.read(Region.whole(name, found[name]))
        assert read.dtype == (torch.float16 if wide else tensor.dtype)
        assert torch.equal(read.float(), (tensor.half() if wide else tensor).float()), name


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
