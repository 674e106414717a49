"""Checkpoints of a job that ranks of one layout save and those of another load."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from d9d.ckpt import Identity, JobCheckpoints, PeerError, export
from d9d.mesh.testing import run_world

sys.path.insert(0, str(Path(__file__).parent))
from sharded_states import TURNS, assert_equal_shards, blank, full_state, sharded


def trained_state() -> dict[str, torch.Tensor]:
    """Parameters of several dtypes with what AdamW has for each."""
    generator = torch.Generator().manual_seed(2)
    state = {f"model.{name}": tensor for name, tensor in full_state().items()}
    for name, tensor in full_state().items():
        state[f"optimizer.{name}.step"] = torch.tensor(3.0)
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{name}.{key}"] = torch.randn(tensor.shape, generator=generator)
    return state


SAVED = (0, 3)  # turns


def save_trained(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for turn in SAVED:
        state = sharded(trained_state(), mesh, turn)
        JobCheckpoints(root / str(turn)).save(1, state, shared={}, per_rank={})


def load_trained(root: Path, shapes: list[tuple[int, int]]) -> None:
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
        for saved in SAVED:
            expected = sharded(trained_state(), mesh, saved + 1)
            state = blank(expected)
            JobCheckpoints(root / str(saved)).latest().load(state)
            assert_equal_shards(state, expected)


def test_four_ranks_save_and_two_and_eight_and_one_go_on(tmp_path):  # cases 30, 31, 35
    run_world(4, save_trained, tmp_path)
    run_world(2, load_trained, tmp_path, [(1, 2), (2, 1)])
    run_world(8, load_trained, tmp_path, [(2, 4)])
    for turn in SAVED:
        state = blank(trained_state())
        JobCheckpoints(tmp_path / str(turn)).latest().load(state)
        assert_equal_shards(state, trained_state())


def save_sharded(root: Path, shape: tuple[int, ...], turn: int) -> None:
    mesh = init_device_mesh("cpu", shape)
    rank = dist.get_rank()
    checkpoints = JobCheckpoints(root)
    per_rank = {"rng": torch.full((3,), rank, dtype=torch.uint8), "metrics": {"loss": [rank, None, "x"]}}
    checkpoints.save(10 + turn, sharded(full_state(), mesh, turn), shared={"epoch": 1}, per_rank=per_rank)


def load_sharded(root: Path, shape: tuple[int, ...], turn: int):
    mesh = init_device_mesh("cpu", shape)
    checkpoint = JobCheckpoints(root).latest()
    expected = sharded(full_state(), mesh, turn)
    state = blank(expected)
    checkpoint.load(state)
    assert_equal_shards(state, expected)
    assert checkpoint.shared == {"epoch": 1}
    return checkpoint.per_rank()


def reshard(root: Path) -> list:
    own = []
    for turn in TURNS:
        save_sharded(root, (2, 2), turn)
        own.append(load_sharded(root, (4, 1), turn + 3))
        own.append(load_sharded(root, (1, 4), turn + 1))
    return own


def test_any_layout_loads_into_any_other_and_each_rank_gets_its_own(tmp_path):  # cases 30, 34, 35
    for rank, own in enumerate(run_world(4, reshard, tmp_path)):
        for state in own:
            assert state["rng"].tolist() == [rank] * 3
            assert state["metrics"] == {"loss": [rank, None, "x"]}
    stored = {
        name for path in tmp_path.rglob("rank-*.safetensors") for name in load_file(path) if name == "shared/step"
    }
    assert stored == {"shared/step"}
    sizes = [sum(p.stat().st_size for p in d.glob("rank-*")) for d in tmp_path.iterdir()]
    total = sum(tensor.nbytes for tensor in full_state().values())
    assert max(sizes) < total + 4 * 4096, "replicas are written once"

    state = blank(full_state())  # one process
    checkpoint = JobCheckpoints(tmp_path).latest()
    checkpoint.load(state)
    assert_equal_shards(state, full_state())
    assert checkpoint.per_rank() is None


def stages(root: Path) -> None:
    """Two stages of a pipeline: names differ between ranks."""
    rank = dist.get_rank()
    mesh = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][rank // 2]
    state = {f"stage{rank // 2}.w": distribute_tensor(torch.arange(5.0) + rank // 2, mesh, [Shard(0)])}
    JobCheckpoints(root / "job").save(1, state, shared={}, per_rank={})
    found = blank(state)
    checkpoint = JobCheckpoints(root / "job").latest()
    checkpoint.load(found)
    assert_equal_shards(found, state)
    with pytest.raises((ValueError, PeerError), match="saved, but not asked for: 'stage0.w'"):
        checkpoint.load({} if rank < 2 else found)
    export(state, Identity(), root / "export")


def test_ranks_with_different_names(tmp_path):
    run_world(4, stages, tmp_path)
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "stage0.w": [0, 1, 2, 3, 4],
        "stage1.w": [1, 2, 3, 4, 5],
    }
