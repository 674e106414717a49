"""Job checkpoints in one process: what comes back, what is refused, and what is kept."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.ckpt import (
    Identity,
    JobCheckpoints,
    Region,
    TensorSpec,
    UnknownFormatError,
    export,
    open_checkpoint,
    verify,
)
from d9d.ckpt._files import TensorFileWriter
from d9d.ckpt._job_read import JobSource
from d9d.ckpt._manifest import Manifest, Stored

sys.path.insert(0, str(Path(__file__).parent))
from saved_jobs import STATE, loaded, save, steps


def test_everything_comes_back(tmp_path):  # cases 34 and 35
    checkpoints = JobCheckpoints(tmp_path)
    shared = {"epoch": 3, "lr": 0.1, "name": "ünï", "none": None, "nested": {"list": [1, [True, 2.5]]}}
    per_rank = {"rng": torch.get_rng_state(), "python": [3, [1, 2**40], None], "flag": False}
    checkpoints.save(12, STATE, shared=shared, per_rank=per_rank)
    checkpoint = JobCheckpoints(tmp_path).latest()
    assert checkpoint.step == 12
    assert checkpoint.shared == shared
    own = checkpoint.per_rank()
    assert torch.equal(own.pop("rng"), per_rank.pop("rng"))
    assert own == per_rank
    state = {name: torch.empty_like(tensor) for name, tensor in STATE.items()}
    checkpoint.load(state)
    for name, tensor in STATE.items():
        assert torch.equal(state[name], tensor), name


def test_names_shapes_and_dtypes_are_strict(tmp_path):  # case 31: nothing is dropped silently
    checkpoints = JobCheckpoints(tmp_path)
    save(
        checkpoints,
        1,
        {"weight": torch.ones(2), "exp_avg.weight": torch.ones(2), "bias": torch.ones(1), "x": torch.ones(1)},
    )
    state = {
        "weight": torch.zeros(3),
        "exp_avg.wieght": torch.zeros(2),
        "bias": torch.zeros(1, dtype=torch.float64),
        "x": torch.zeros(1),
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared
        checkpoints.latest().load(state)
    assert str(caught.value).splitlines() == [
        "the checkpoint of step 1 has other tensors than are to be loaded:",
        "  asked for, but not saved: 'exp_avg.wieght' (nearest: 'exp_avg.weight')",
        "  saved, but not asked for: 'exp_avg.weight' (nearest: 'exp_avg.wieght')",
        "  saved as [2] float32, asked for as [3] float32: 'weight'",
        "  saved as [1] float32, asked for as [1] float64: 'bias'",
    ]
    assert state["x"].item() == 0, "nothing is written when anything is wrong"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), r"shared\['x'\] is a tuple"),
        ({1: 2}, r"shared\['x'\] has the key 1"),
        ([{"a": {1}}], r"shared\['x'\]\[0\]\['a'\] is a set"),
        (torch.ones(1), r"shared\['x'\] is a Tensor"),
        (float, r"shared\['x'\] is a type"),
        (-(10**4100), r"shared\['x'\] is an int of 13620 bits"),
    ],
)
def test_what_json_would_change_is_refused(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        save(JobCheckpoints(tmp_path), 1, shared={"x": value})
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"shared": []}, TypeError, "shared is a list: give values by name"),
        ({"shared": None}, TypeError, "shared is a NoneType: give values by name"),
        ({"per_rank": [("a", 1)]}, TypeError, "per_rank is a list: give values by name"),
        ({"per_rank": {1: torch.ones(1), "1": torch.zeros(1)}}, TypeError, "per_rank has the key 1"),
        ({"per_rank": {"a": torch.ones(1, device="meta")}}, ValueError, r"on meta have no data to write: \['a'\]"),
        ({"per_rank": {"a": torch.ones(1).to_sparse()}}, ValueError, r"call `to_dense` first: \['a'\]"),
        ({"tensors": {1: torch.ones(1)}}, TypeError, "the name 1 is no string"),
        ({"tensors": {"\ud800": torch.ones(1)}}, ValueError, "half of a character"),
        ({"step": True}, ValueError, r"step must be a whole number from 0 to 2\*\*63 - 1, got True"),
        ({"step": 2**63}, ValueError, "step must be a whole number"),
        ({"step": 1.0}, ValueError, "step must be a whole number"),
    ],
)
def test_what_would_not_come_back_is_refused(tmp_path, state, error, message):
    checkpoints = JobCheckpoints(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(error, match=message):
        checkpoints.save(**{"step": 2, "tensors": {}, "shared": {}, "per_rank": {}, **state})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_save_that_cannot_be_read_is_an_error_and_removes_nothing(tmp_path, monkeypatch):
    checkpoints = JobCheckpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    monkeypatch.setattr("d9d.ckpt._manifest.Manifest.dumps", lambda self: "{}")
    with pytest.raises(ValueError, match="the manifest is damaged"):
        save(checkpoints, 2)
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    assert checkpoints.latest().step == 1


def test_a_file_in_place_of_the_directory_is_no_fresh_start(tmp_path):
    (tmp_path / "job").write_text("")
    with pytest.raises(NotADirectoryError, match="job"):
        JobCheckpoints(tmp_path / "job").latest()


def test_the_last_ones_are_kept(tmp_path):
    checkpoints = JobCheckpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (8, 9, 10, 100):
        save(checkpoints, step)
    assert steps(tmp_path) == ["step-00000010", "step-00000100"]
    with pytest.raises(ValueError, match="keep must be a whole number of at least 1, got 0"):
        JobCheckpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep must be a whole number of at least 1, got 2.5"):
        JobCheckpoints(tmp_path, keep=2.5)
    with pytest.raises(ValueError, match="step must be a whole number from 0 .*, got -1"):
        save(checkpoints, -1)


def test_a_step_may_be_saved_again(tmp_path):
    checkpoints = JobCheckpoints(tmp_path)
    for value in (1.0, 2.0, 3.0):
        save(checkpoints, 5, {"w": torch.full((3,), value)})
    assert loaded(checkpoints.latest()) == [3, 3, 3]
    assert steps(tmp_path) == ["step-00000005.3"]


def test_names_with_braces_and_progress(tmp_path):
    save(JobCheckpoints(tmp_path), 1, {"w{0}": torch.ones(3), "}": torch.ones(0)})
    state, told = {"w{0}": torch.zeros(3), "}": torch.zeros(0)}, []
    JobCheckpoints(tmp_path).latest().load(state, memory_budget=0, progress=lambda *args: told.append(args))
    assert state["w{0}"].tolist() == [1, 1, 1]
    assert (told[0], told[-1]) == ((0, 12), (12, 12))


def test_newer_formats_are_neither_read_nor_removed(tmp_path):
    checkpoints = JobCheckpoints(tmp_path)
    save(checkpoints, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
    with pytest.raises(UnknownFormatError, match="'version': 2"):
        checkpoints.latest()


def test_a_save_leaves_newer_formats_alone(tmp_path):
    checkpoints = JobCheckpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
    save(checkpoints, 2)
    save(checkpoints, 3)
    assert steps(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_save_gets_along_with_what_others_left(tmp_path):
    checkpoints = JobCheckpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    (tmp_path / ".step-00000001.partial" / "full").mkdir(parents=True)
    (tmp_path / "step-00000002").write_text("a file")
    save(checkpoints, 3)
    assert steps(tmp_path) == ["step-00000002", "step-00000003"]


def test_exports_from_a_job_checkpoint(tmp_path):
    save(JobCheckpoints(tmp_path / "job"), 1, {"a": torch.arange(6).reshape(2, 3)})
    source = JobCheckpoints(tmp_path / "job").latest().source
    state = {name: source.read(Region.whole(name, spec)) for name, spec in source.items()}
    export(state, Identity(), tmp_path / "hf")
    assert open_checkpoint(tmp_path / "hf").read(Region("a", [1, 0], [1, 3])).tolist() == [[3, 4, 5]]
    with pytest.raises(FileExistsError, match="hf' exists"):
        export(state, Identity(), tmp_path / "hf")


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_region_is_assembled_from_any_chunks(tmp_path_factory, data):
    """Chunks of a random grid, in files of random ranks."""
    tensor = torch.arange(data.draw(st.integers(1, 8)) * 7).reshape(-1, 7)
    cuts = [sorted({0, length, *data.draw(st.sets(st.integers(0, length), max_size=3))}) for length in tensor.shape]
    chunks = [
        Region("w", (top, left), (bottom - top, right - left))
        for top, bottom in itertools.pairwise(cuts[0])
        for left, right in itertools.pairwise(cuts[1])
    ]
    directory = tmp_path_factory.mktemp("chunks")
    stored = []
    for number, chunk in enumerate(chunks):
        values = tensor[chunk.slices]
        with TensorFileWriter(directory / str(number), {"key": TensorSpec.of(values)}) as writer:
            stored.append(Stored(chunk, str(number), "key", writer.write("key", values)))
    specs = {"w": TensorSpec.of(tensor)}
    source = JobSource(directory, Manifest(step=0, shared={}, specs=specs, stored={"w": stored}, ranks=[]))
    offset = [data.draw(st.integers(0, length)) for length in tensor.shape]
    region = Region("w", offset, [data.draw(st.integers(0, n - o)) for n, o in zip(tensor.shape, offset)])
    assert torch.equal(source.read(region), tensor[region.slices])


def test_a_job_checkpoint_is_opened_by_its_path(tmp_path):
    tensors = {"w": torch.arange(6.0)}
    JobCheckpoints(tmp_path / "job").save(1, tensors, shared={}, per_rank={"own": torch.ones(2)})
    step = tmp_path / "job" / "step-00000001"
    assert dict(open_checkpoint(step)) == {"w": TensorSpec([6], torch.float32)}
    with pytest.raises(FileNotFoundError, match=r"1 job checkpoint\(s\): name one, such as .*step-00000001"):
        open_checkpoint(tmp_path / "job")
    with pytest.raises(FileNotFoundError, match="name one"):
        verify(tmp_path / "job")
    with pytest.raises(ValueError, match="is a job checkpoint: open it alone, or convert it first"):
        open_checkpoint([step, tmp_path])
