"""What needs several ranks: regions of DTensors, sharded loading, export, resharding. One world of four."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from d9d.ckpt import (
    Concatenate,
    Identity,
    JobCheckpoints,
    Parallel,
    PeerError,
    Rename,
    Sequential,
    Stack,
    Transpose,
    convert,
    export,
    load,
    open_checkpoint,
)
from d9d.ckpt._collective import all_gather
from d9d.ckpt._files import TensorFileWriter
from d9d.ckpt._local import local_region
from d9d.mesh.testing import run_world

EXPERTS, INNER, HIDDEN, VOCABULARY = 6, 4, 6, 11
MAPPER = Parallel(
    Rename("model.embed", "embed"),
    Transpose("lm_head", "head"),
    Sequential(
        Concatenate(["experts.{e}.gate", "experts.{e}.up"], "experts.{e}.gate_up", sizes=(INNER, INNER)),
        Stack("experts.{e}.gate_up", "gate_up", count=EXPERTS),
    ),
    Identity("step", "mask", "empty", "few"),
)


def hugging_face_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed": torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16(),
        "lm_head": torch.randn(HIDDEN, VOCABULARY, generator=generator),
        "step": torch.tensor(7),
        "mask": torch.rand(5, generator=generator) > 0.5,
        "empty": torch.zeros(0, 3),
        "few": torch.randn(2, 3, generator=generator),
    }
    for expert in range(EXPERTS):
        for name in ("gate", "up"):
            tensors[f"experts.{expert}.{name}"] = torch.randn(INNER, HIDDEN, generator=generator)
    return tensors


def full_state() -> dict[str, torch.Tensor]:
    return dict(MAPPER.apply(hugging_face_tensors()))


STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
PLACEMENTS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    STRIDED,
    (Replicate(), Shard(1)),
]
TURNS = range(0, len(PLACEMENTS), 2)


def sharded(state, mesh: DeviceMesh, turn: int):
    """Each tensor of two or more dims by another of the placements; others sharded on dim 0, or plain."""
    result = {}
    for index, (name, tensor) in enumerate(sorted(state.items())):
        if tensor.ndim == 0:
            result[name] = tensor.clone()
            continue
        placements = PLACEMENTS[(turn + index) % len(PLACEMENTS)] if tensor.ndim > 1 else (Replicate(), Shard(0))
        result[name] = strided(tensor, mesh) if placements == STRIDED else distribute_tensor(tensor, mesh, placements)
    return result


def strided(tensor, mesh: DeviceMesh) -> DTensor:
    """Dim 0 by the second mesh dim first, within that by the first: as tensor parallelism under FSDP."""
    first, second = mesh.get_coordinate()
    parts = list(tensor.chunk(mesh.size(1)))
    part = parts[second] if second < len(parts) else tensor[:0]
    rows = list(part.chunk(mesh.size(0))) if len(part) else []
    local = rows[first] if first < len(rows) else tensor[:0]
    placements = (_StridedShard(0, split_factor=mesh.size(1)), Shard(0))
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def assert_equal_shards(found, expected):
    for name, tensor in expected.items():
        ours = found[name].to_local() if isinstance(found[name], DTensor) else found[name]
        theirs = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def blank(state):
    return {name: zeros_like(tensor) for name, tensor in state.items()}


def zeros_like(tensor):
    """As torch's, which is slow for a DTensor of a new shape or layout."""
    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor)
    local, mesh = torch.zeros_like(tensor.to_local()), tensor.device_mesh
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
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


def failing_rank(root: Path, what: str) -> str:
    state = {"w": torch.ones(4)}
    if dist.get_rank() == 2:
        state["w"] = torch.ones(5) if what == "layout" else torch.ones(4)
        if what == "meta":  # a tensor that only this rank has, and others would wait for
            state["x"] = torch.ones(4, device="meta")
    original = TensorFileWriter.write
    if what == "write" and dist.get_rank() == 0:

        def full(self, name, tensor):
            raise OSError(28, "No space left on device")

        TensorFileWriter.write = full
    errors = []
    try:
        for operation in (
            lambda: export(state, Identity(), root / "export", max_shard_bytes=1),
            lambda: JobCheckpoints(root / "job").save(1, state, shared={}, per_rank={"rank": dist.get_rank()}),
        ):
            try:
                operation()
            except (OSError, ValueError, PeerError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    finally:
        TensorFileWriter.write = original
    dist.barrier()
    return "\n".join([*errors, *sorted(path.name for path in root.rglob("*"))])


@pytest.mark.parametrize("what", ["write", "layout", "meta"])
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path, what):  # case 33
    first, *others = run_world(4, failing_rank, tmp_path, what)
    for text in (first, *others):
        lines = text.splitlines()
        if what == "write":
            prefix = "OSError: " if text is first else "PeerError: rank 0 failed: OSError: "
            assert lines == [f"{prefix}[Errno 28] No space left on device"] * 2 + ["job"]
        elif what == "meta":
            assert text.count("tensors on meta have no data to write: ['x']") == 2
            assert lines[2:] == []
        else:
            assert text.count("'w' is [5] float32 on rank 2, [4] float32 on a lower one") == 2


def wide_tensors() -> dict[str, torch.Tensor]:
    """Large enough for headers to be next to nothing."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed": (64, 48), "lm_head": (48, 64), "few": (64, 32)}
    shapes |= {f"experts.{e}.{name}": (INNER, 2048) for e in range(EXPERTS) for name in ("gate", "up")}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


WIDE = Parallel(*MAPPER.mappers[:3], Identity("few"))


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


def failing_convert(root: Path) -> str:
    if dist.get_rank() == 2:
        os.preadv = lambda *args: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    try:
        convert(open_checkpoint(root / "source"), WIDE, root / "out", max_shard_bytes=1)
    except (OSError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_failed_read_on_one_rank_is_an_error_on_all(tmp_path):
    (tmp_path / "source").mkdir()
    save_file(wide_tensors(), tmp_path / "source" / "model.safetensors")
    first, *_, last = run_world(4, checked_failing_convert, tmp_path)
    assert "rank 2 failed: ReadError" in first == last
    assert "Input/output error" in first
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def checked_failing_convert(root: Path) -> str:
    original = os.preadv
    try:
        return failing_convert(root)
    finally:
        os.preadv = original


def other_mappers(root: Path) -> list[str]:
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    save_once(root / "source", tensors)
    odd = dist.get_rank() == 3
    errors = []
    for mapper, options in (
        (Parallel(Rename("a", "x" if odd else "y"), Identity("b")), {}),
        (Identity(), {"max_shard_bytes": 32 if odd else 16}),
        (Identity(), {"dtype": torch.bfloat16 if odd else None}),
    ):
        for write, source in ((export, tensors), (convert, open_checkpoint(root / "source"))):
            with pytest.raises(ValueError, match="ranks would write different things") as caught:
                write(source, mapper, root / "out", **options)
            errors.append(str(caught.value))
    return errors


def save_once(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
    dist.barrier()


def test_ranks_with_other_mappers_or_options_are_told(tmp_path):
    first, *others = run_world(4, other_mappers, tmp_path)
    assert all(errors == first for errors in others)
    assert all("rank 0 'a' as [4] float32 into" in error for error in first[2:])
    assert "rank 0 'y' as" in first[0]
    assert "rank 3 'x' as" in first[0]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


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
