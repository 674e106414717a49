"""Case 32: ranks whose sets and dicts are ordered differently export the same."""

import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from d9d.ckpt import Chunk, Concatenate, Parallel, Region, Sequential, Stack, export, open_checkpoint


def export_with_seeds(root: Path, seed: int, runs: int) -> None:
    """Two ranks: a fork of this process, with its seed, and a fresh process with another."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    fresh = subprocess.Popen(
        [sys.executable, __file__, root, str(runs)],
        env={**os.environ, **world, "RANK": "1", "PYTHONHASHSEED": str(seed)},
    )
    forked = multiprocessing.get_context("fork").Process(target=join, args=({**world, "RANK": "0"}, root, runs))
    forked.start()
    try:
        assert fresh.wait(timeout=300) == 0
        forked.join(timeout=300)
        assert forked.exitcode == 0
    finally:
        fresh.kill()
        forked.kill()


def export_sharded(root: Path, runs: int) -> None:
    """Joins the world of the environment's variables and exports `runs` times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = [f"layers.{layer}.{name}" for layer in range(4) for name in ("q", "k", "v", "o")]
    values = {
        name: distribute_tensor(torch.full((7, 3), float(index)), mesh, [Shard(0)]) for index, name in enumerate(names)
    }
    state = {name: values[name] for name in set(names)}  # in order of hashes
    mapper = Parallel(
        Concatenate([f"layers.{{i}}.{name}" for name in "qkv"], "layers.{i}.qkv", sizes=(7, 7, 7)),
        Sequential(Stack("layers.{i}.o", "o", count=4), Chunk("o", ["first", "second"], sizes=(1, 3))),
    )
    for run in range(runs):
        export(state, mapper, root / str(run), max_shard_bytes=200)
    dist.barrier()
    dist.destroy_process_group()


def join(world: dict[str, str], root: Path, runs: int) -> None:
    os.environ.update(world)
    export_sharded(root, runs)


def check(directory: Path) -> None:
    source = open_checkpoint(directory)
    read = {name: source.read(Region.whole(name, source[name])) for name in source}
    for layer in range(4):
        expected = torch.arange(4.0 * layer, 4 * layer + 3).repeat_interleave(7)[:, None].expand(21, 3)
        assert torch.equal(read[f"layers.{layer}.qkv"], expected)
    assert torch.equal(torch.cat([read["first"], read["second"]])[:, 0, 0], torch.tensor([3.0, 7, 11, 15]))


def test_export_under_different_hash_seeds(tmp_path):
    export_with_seeds(tmp_path, seed=1, runs=20)
    for run in range(20):
        check(tmp_path / str(run))


@pytest.mark.long
def test_export_under_six_different_hash_seeds(tmp_path):
    for run in range(6):
        (tmp_path / str(run)).mkdir()
        export_with_seeds(tmp_path / str(run), seed=run, runs=1)
        check(tmp_path / str(run) / "0")


if __name__ == "__main__":
    export_sharded(Path(sys.argv[1]), int(sys.argv[2]))
