"""SIGKILL at any moment loses nothing: started again, the run becomes what it would have been without."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pretrain
import pytest

from d9d.ckpt import JobCheckpoints
from d9d.loop.config import load
from d9d.mesh.testing import Job, run_world, start_job

STEPS = 60
SAVED_EVERY = 5
TIMEOUT = 300.0  # a loaded machine takes its time to import torch in three processes


def _log(run: Path) -> list[dict[str, float]]:
    """The whole lines of the log."""
    file = run / "log.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


class Launched:
    """The example on two ranks under torchrun."""

    def __init__(self, script: Path, arguments: list[str], output: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        self._file = output
        with output.open("wb") as stream:
            self._process = subprocess.Popen([*command, script, *arguments], stdout=stream, stderr=stream)

    def output(self) -> str:
        return self._file.read_text()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.is_running():
            # torchrun puts its workers into sessions of their own
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            for process in [self._process.pid, *map(int, children.read_text().split())]:
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    kill = close

    def wait(self) -> int:
        return self._process.wait(TIMEOUT)


def _kill_at(step: int, delay: float, run: Path, job: Job | Launched) -> None:
    """Wait for a step to be logged and a moment more, then kill: anywhere in a step or in a save."""
    deadline = time.monotonic() + TIMEOUT
    while not any(line["step"] >= step for line in _log(run)[-1:]):
        assert job.is_running(), job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.001)
    time.sleep(delay)
    assert job.is_running(), job.output()
    job.kill()


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_that_is_killed_is_bit_equal_to_one_that_was_not(script: Path, tiny, tmp_path, kills):
    arguments = [
        *tiny,
        "--mesh.replicate",
        "2",
        "--trainer.steps",
        str(STEPS),
        "--trainer.checkpoint_every",
        str(SAVED_EVERY),
    ]
    whole, run, output = tmp_path / "whole", tmp_path / "run", tmp_path / "output.txt"
    config = load(
        pretrain.PretrainConfig, script.with_name("small.toml"), [*arguments, "--trainer.directory", str(whole)]
    )
    run_world(2, pretrain.main, config, timeout=TIMEOUT)

    moments = random.Random(2)
    *early, last = sorted(moments.sample(range(1, STEPS), kills))
    config = load(pretrain.PretrainConfig, script.with_name("small.toml"), arguments)
    for step in early:  # forks, since torchrun spends its time on importing torch
        with start_job(2, pretrain.main, config) as job:
            _kill_at(step, moments.uniform(0.0, 0.05), run, job)
    with closing(Launched(script, arguments, output)) as job:
        _kill_at(last, moments.uniform(0.0, 0.05), run, job)
    logged = _log(run)[-1]["step"]
    with closing(Launched(script, arguments, output)) as job:
        assert job.wait() == 0, job.output()
    # it went on from the last checkpoint, of which nothing is sure if its own step was the last one logged
    resumed = re.search(r"bits per byte on held-out files\n  at step (\d+)", output.read_text())
    assert resumed is not None, output.read_text()
    assert int(resumed[1]) >= (logged - 1) // SAVED_EVERY * SAVED_EVERY > 0

    log, expected = _log(run), _log(whole)
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [line[name] for line in log] == [line[name] for line in expected], name
    exported = f"hugging_face-{STEPS}/model.safetensors"
    _assert_equal_bytes(run / exported, whole / exported)
    [checkpoint, wanted] = [JobCheckpoints(directory / "checkpoints").latest() for directory in (run, whole)]
    assert checkpoint.step == wanted.step == STEPS
    files = sorted(file.relative_to(wanted.directory) for file in wanted.directory.rglob("*") if file.is_file())
    assert len(files) >= 3
    for file in files:
        _assert_equal_bytes(checkpoint.directory / file, wanted.directory / file)


def _assert_equal_bytes(file: Path, expected: Path) -> None:
    assert file.read_bytes() == expected.read_bytes(), file
