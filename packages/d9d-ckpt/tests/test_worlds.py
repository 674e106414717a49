"""What needs several ranks: regions of DTensors, sharded loading, export and conversion."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from d9d.ckpt import Identity, convert, export, load, open_checkpoint
from d9d.ckpt._collective import all_gather
from d9d.ckpt._files import TensorFileWriter
from d9d.ckpt._local import local_region
from d9d.mesh.testing import run_world

sys.path.insert(0, str(Path(__file__).parent))
from sharded_states import (
    MAPPER,
    PLACEMENTS,
    STRIDED,
    TURNS,
    WIDE,
    assert_equal_shards,
    blank,
    full_state,
    hugging_face_tensors,
    sharded,
    strided,
    wide_tensors,
)


def check_regions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for rows in range(10):
        tensor = torch.arange(rows * 3).reshape(rows, 3)
        even = [distribute_tensor(tensor, mesh, placements) for placements in PLACEMENTS if placements != STRIDED]
        for case in [*even, strided(tensor, mesh)]:
            offset, shape = local_region(case)
            local = case.to_local()
            assert shape == tuple(local.shape), (rows, case.placements)
            index = tuple(slice(start, start + length) for start, length in zip(offset, shape))
            assert torch.equal(tensor[index], local), (rows, case.placements)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="reduce it first"):
        local_region(partial)
    gaps = DTensor.from_local(
        torch.ones(2), mesh, [_StridedShard(0, split_factor=2), Replicate()], shape=(4,), stride=(1,)
    )
    with pytest.raises(ValueError, match="no rectangle"):
        local_region(gaps)
    half = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() >= 2:
        outside = DTensor.from_local(torch.empty(0), half, [Shard(0)], run_check=False, shape=(4,), stride=(1,))
        assert local_region(outside) == ((0,), (0,))


def test_local_regions_of_even_uneven_empty_and_strided_shards():
    run_world(4, check_regions)


def check_objects() -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", None)  # it needs numpy, which may not be there
        assert all_gather("x" * rank, None) == ["x" * other for other in range(dist.get_world_size())]
        assert all_gather(None, None) == [None] * dist.get_world_size()


def test_ranks_tell_each_other_objects_of_any_length_without_numpy():
    run_world(4, check_objects)


def check_round_trip(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    source = open_checkpoint(root / "source")
    for turn in TURNS:
        expected = sharded(full_state(), mesh, turn)
        state = blank(expected)
        load(source, MAPPER, state)
        assert_equal_shards(state, expected)
        export(state, MAPPER.inverse(), root / f"out{turn}", max_shard_bytes=300, extra_files={"config.json": "{}"})


def test_round_trip_through_any_sharding_is_byte_identical(tmp_path):
    (tmp_path / "source").mkdir()
    save_file(hugging_face_tensors(), tmp_path / "source" / "model.safetensors")
    run_world(4, check_round_trip, tmp_path)
    export(full_state(), MAPPER.inverse(), tmp_path / "single", max_shard_bytes=300, extra_files={"config.json": "{}"})
    files = {path.name: path.read_bytes() for path in (tmp_path / "single").iterdir()}
    assert len(files) > 6
    for turn in TURNS:
        assert {path.name: path.read_bytes() for path in (tmp_path / f"out{turn}").iterdir()} == files
    found = {}
    for path in (tmp_path / "out0").glob("*.safetensors"):
        found |= load_file(path)
    expected = hugging_face_tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    index = json.loads((tmp_path / "out0" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert not list(tmp_path.glob(".*"))


def read_quarters(root: Path) -> list[int]:
    """Bytes read by this rank: for quarters on the first dim, on the last, on both, and to convert its files."""
    mesh = init_device_mesh("cpu", (2, 2))
    counts = []
    original = os.preadv

    def preadv(descriptor, buffers, offset):
        counts[-1] += (count := original(descriptor, buffers, offset))
        return count

    source = open_checkpoint(root / "source")
    full = WIDE.apply(wide_tensors())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        patch.setattr("d9d.ckpt._stream.count_threads", lambda: 1)  # counts are not shared
        for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(1)], [Shard(0), Shard(1)]):
            counts.append(0)
            expected = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in full.items()}
            state = blank(expected)
            load(source, WIDE, state)
            assert_equal_shards(state, expected)
        counts.append(0)
        convert(source, WIDE, root / "converted", max_shard_bytes=20_000)
    return counts


def test_four_ranks_read_the_checkpoint_once(tmp_path):
    (tmp_path / "source").mkdir()
    save_file(wide_tensors(), tmp_path / "source" / "model.safetensors")
    total = (tmp_path / "source" / "model.safetensors").stat().st_size
    for counts in zip(*run_world(4, read_quarters, tmp_path)):
        assert 0.95 * total < sum(counts) <= 1.05 * total
    convert(open_checkpoint(tmp_path / "source"), WIDE, tmp_path / "alone", max_shard_bytes=20_000)
    files = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert len(files) > 4
    assert {path.name: path.read_bytes() for path in (tmp_path / "converted").iterdir()} == files


def exported_owners(root: Path) -> list[str]:
    """Names of the files that this rank writes, where each rank holds one layer whole and a slice of another."""
    mesh = init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    state = {f"layers.{rank}": torch.full((8, 4), float(rank))}
    state["shared"] = distribute_tensor(torch.arange(32.0).reshape(8, 4).T.contiguous(), mesh, [Shard(1)])
    written = []
    original = TensorFileWriter.write

    def write(self, name, tensor):
        written.append(name)
        return original(self, name, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFileWriter, "write", write)
        patch.setattr("d9d.ckpt._export.IN_FLIGHT", 40)  # less than a tensor
        export(state, Identity(), root / "out", max_shard_bytes=1, dtype=torch.bfloat16)
    return written


def test_files_are_written_where_their_tensors_are(tmp_path):
    written = run_world(4, exported_owners, tmp_path)
    assert [names[0] for names in written] == [f"layers.{rank}" for rank in range(4)]
    assert sum(names.count("shared") for names in written) == 1
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    assert torch.equal(found["shared"], torch.arange(32).reshape(8, 4).T.bfloat16())
    assert all(torch.equal(found[f"layers.{rank}"], torch.full((8, 4), rank).bfloat16()) for rank in range(4))
