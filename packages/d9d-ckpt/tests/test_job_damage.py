"""Job checkpoints after damage and death: what is broken is found and said, and nothing that is complete is lost."""

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from d9d.ckpt import (
    ChecksumError,
    JobCheckpoints,
    Region,
)
from d9d.ckpt._manifest import Manifest

sys.path.insert(0, str(Path(__file__).parent))
from saved_jobs import loaded, save, steps


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
