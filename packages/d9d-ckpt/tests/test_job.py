"""Job checkpoints in one process: what comes back, what is refused, and that nothing is lost."""

import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.ckpt import (
    ChecksumError,
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


def save(checkpoints, step, tensors=None, **kwargs):
    tensors = {"w": torch.full((3,), float(step))} if tensors is None else tensors
    checkpoints.save(step, tensors, **{"shared": {}, "per_rank": {}, **kwargs})


def steps(root):
    return sorted(path.name for path in root.iterdir())


def loaded(checkpoint):
    state = {"w": torch.zeros(3)}
    checkpoint.load(state)
    return state["w"].tolist()


STATE = {
    "bool": torch.tensor([True, False, True]),
    "zero_dim": torch.tensor(3.5, dtype=torch.float64),
    "step": torch.tensor(7),
    "bf16": torch.randn(3, 4).bfloat16(),
    "empty": torch.zeros(0, 4),
    "strided": torch.randn(4, 3).T,
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


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


def break_file(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit_chunk(directory, **changes):
    manifest = directory / "manifest.json"
    document = json.loads(manifest.read_text())
    document["tensors"]["w"]["chunks"][0] |= changes
    manifest.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: break_file(d / "rank-00000.safetensors"), "bytes, has"),
        (lambda d: (d / "rank-00000.safetensors").unlink(), "No such file"),
        (lambda d: (d / "manifest.json").unlink(), "No such file"),
        (lambda d: break_file(d / "manifest.json"), "Expecting"),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest is damaged"),
        (lambda d: edit_chunk(d, shape=[2]), "the chunks of 'w' are not all of [3] float32"),
        (lambda d: edit_chunk(d, offset=[1]), "the chunks of 'w' are not all of [3] float32"),
    ],
)
def test_broken_ones_are_skipped_said_and_replaced(tmp_path, caplog, damage, message):  # case 33
    checkpoints = JobCheckpoints(tmp_path, keep=3)
    save(checkpoints, 1)
    save(checkpoints, 2)
    damage(tmp_path / "step-00000002")
    with caplog.at_level(logging.WARNING, "d9d.ckpt"):
        assert checkpoints.latest().step == 1
    assert "skipping the broken checkpoint" in caplog.text
    assert "step-00000002" in caplog.text
    assert message in caplog.text
    save(checkpoints, 2, {"w": torch.full((3,), 22.0)})
    assert loaded(checkpoints.latest()) == [22, 22, 22]
    assert steps(tmp_path) == ["step-00000001", "step-00000002.2"]


def test_nothing_but_broken_ones_is_no_fresh_start(tmp_path):
    checkpoints = JobCheckpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    for step in steps(tmp_path):
        (tmp_path / step / "rank-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete.*step-00000002', 'step-00000001'"):
        checkpoints.latest()


def test_a_step_may_be_saved_again(tmp_path):
    checkpoints = JobCheckpoints(tmp_path)
    for value in (1.0, 2.0, 3.0):
        save(checkpoints, 5, {"w": torch.full((3,), value)})
    assert loaded(checkpoints.latest()) == [3, 3, 3]
    assert steps(tmp_path) == ["step-00000005.3"]


def test_flipped_bits_are_found_on_loading(tmp_path):
    checkpoints = JobCheckpoints(tmp_path)
    save(checkpoints, 1, per_rank={"rng": torch.ones(3)})
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    for offset in (-1, -13):  # in each of the two tensors
        data[offset] ^= 1
    path.write_bytes(data)
    checkpoint = checkpoints.latest()
    with pytest.raises(ValueError, match="'w' is damaged: its data in .*rank-00000.safetensors' has the checksum"):
        loaded(checkpoint)
    with pytest.raises(ValueError, match="'rng' is damaged"):
        checkpoint.per_rank()


def test_a_chunk_is_compared_once_and_then_read_as_wanted(tmp_path, monkeypatch):
    values = torch.arange(4000).reshape(40, 100)
    save(JobCheckpoints(tmp_path), 1, {"w": values})
    monkeypatch.setattr("d9d.ckpt._hands.PIECE", 3000)
    read, original = [], os.preadv

    def preadv(descriptor, buffers, offset):
        read.append(count := original(descriptor, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    source = JobCheckpoints(tmp_path).latest().source
    for wanted, nbytes in (((3, 50, 2, 7), values.nbytes), ((0, 0, 40, 100), values.nbytes), ((8, 1, 2, 9), 2 * 9 * 8)):
        read.clear()
        region = Region("w", wanted[:2], wanted[2:])
        assert torch.equal(source.read(region), values[region.slices])
        assert sum(read) == nbytes
        assert max(read) <= 3000, "in pieces"


def test_damage_beside_what_is_wanted_is_found(tmp_path):
    save(JobCheckpoints(tmp_path), 1, {"w": torch.zeros(40, 100)})
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    source = JobCheckpoints(tmp_path).latest().source
    for _ in range(2):
        with pytest.raises(ChecksumError, match="'w' is damaged"):
            source.read(Region("w", [0, 0], [1, 1]))


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


def test_a_chunk_of_another_shape_is_damaged(tmp_path):
    checkpoints = JobCheckpoints(tmp_path)
    save(checkpoints, 1, {"w": torch.zeros(1, 3)})
    manifest = tmp_path / "step-00000001" / "manifest.json"
    edit_chunk(tmp_path / "step-00000001", shape=[3, 1])
    document = json.loads(manifest.read_text())
    document["tensors"]["w"]["shape"] = [3, 1]
    manifest.write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=r"'w' is damaged: .* has \[1, 3\] float32 under 'shared/w', the manifest \[3, 1\]"
    ):
        checkpoints.latest().load({"w": torch.zeros(3, 1)})


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


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


def test_death_before_any_durable_step_leaves_a_complete_checkpoint(tmp_path, monkeypatch, caplog):  # case 33
    """Every system call that makes a save durable is, in turn, the last one that does not happen."""
    die_at = 0
    calls = 0

    def counted(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == die_at:
                raise Killed
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    checkpoints = JobCheckpoints(tmp_path, keep=1)
    save(checkpoints, 0)
    for step in range(1, 100):
        calls, die_at = 0, step
        try:
            save(checkpoints, step)
        except Killed:
            die_at = 0
            caplog.clear()
            latest = checkpoints.latest()
            unfinished = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
            assert caplog.text.count("skipping the unfinished") == len(unfinished)
            assert latest.step in (step - 1, step)
            assert loaded(latest) == [float(latest.step)] * 3
            save(checkpoints, step)  # the run goes on
            assert steps(tmp_path) in ([f"step-{step:08d}"], [f"step-{step:08d}.2"])
        else:
            break
    assert step > 8, "there are more durable steps than that"


def save_forever(root):
    torch.set_num_threads(1)
    checkpoints = JobCheckpoints(root, keep=2)
    last = checkpoints.latest()
    for step in range(0 if last is None else last.step + 1, 10**6):
        tensors = {f"w{i}": torch.full((50_000,), float(step)) for i in range(4)}
        save(checkpoints, step, tensors, shared={"step": step}, per_rank={"rng": torch.full((10,), step)})


def test_sigkill_at_random_moments(tmp_path):  # case 33
    rng = random.Random(0)
    last = -1
    for _ in range(15):
        process = multiprocessing.get_context("fork").Process(target=save_forever, args=(tmp_path,))
        process.start()
        while process.is_alive() and len(list(tmp_path.glob("step-*"))) < 2:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        checkpoint = JobCheckpoints(tmp_path).latest()
        assert checkpoint.step >= last
        last = checkpoint.step
        state = {f"w{i}": torch.zeros(50_000) for i in range(4)}
        checkpoint.load(state)
        assert all(torch.equal(tensor, torch.full((50_000,), float(last))) for tensor in state.values())
        assert checkpoint.shared == {"step": last}
        assert checkpoint.per_rank()["rng"].tolist() == [last] * 10
    assert last > 0


def test_chunks_that_hide_a_hole_are_damage(tmp_path):
    save(JobCheckpoints(tmp_path), 1, {"w": torch.ones(2, 3)})
    path = tmp_path / "step-00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    entry = manifest["tensors"]["w"]
    entry["shape"] = [4, 3]
    entry["chunks"] *= 2  # as many elements as the tensor has, the same ones twice
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="the chunks of 'w' overlap"):
        Manifest.read(path.parent)


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
