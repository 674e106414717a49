import io
import json
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from d9d.loop.config import load
from d9d.loop.track import (
    JsonLinesConfig,
    JsonLinesTracker,
    ProgressConfig,
    ProgressTracker,
    Speedometer,
    Tracker,
    TrackerConfig,
    peak_flops,
)


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@settings(deadline=None)
@given(st.floats())
def test_floats_come_back_bit_equal(tmp_path_factory, value):
    file = tmp_path_factory.mktemp("log") / "log.jsonl"
    tracker = JsonLinesTracker(file, done=0)
    tracker.log(1, {"loss": value, "tokens": 3})
    tracker.close()
    (line,) = read(file)
    assert line["tokens"] == 3
    assert repr(float(line["loss"])) == repr(value)  # tells −0 from 0, and NaN is NaN


@pytest.mark.parametrize("killed_inside", range(0, 60, 7))
def test_a_resumed_log_has_every_step_once(tmp_path, killed_inside):
    file = tmp_path / "log.jsonl"
    first = JsonLinesTracker(file, done=0)
    for step in range(1, 8):
        first.log(step, {"loss": step / 3})
    first.close()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - killed_inside])
    second = JsonLinesTracker(file, done=5)
    second.flush()
    for step in range(6, 10):
        second.log(step, {"loss": step / 3})
    second.close()
    assert [(line["step"], line["loss"]) for line in read(file)] == [(step, step / 3) for step in range(1, 10)]
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_run_that_starts_again_from_nothing_starts_its_log_again(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n[1]\n\xff\n{"st')
    JsonLinesTracker(tmp_path / "log.jsonl", done=0).close()
    assert (tmp_path / "log.jsonl").read_bytes() == b""


METRICS = {"loss": 1.5, "tokens_per_second": 12345.6, "mfu": 0.4213, "memory_gib": 2.25, "lr": 1e-3}


def test_progress_off_a_terminal_prints_lines_now_and_then_and_the_last():
    out = io.StringIO()
    tracker = ProgressTracker(done=4, steps=10, interval=1000.0, console=Console(file=out, soft_wrap=True))
    for step in range(5, 11):
        tracker.log(step, METRICS)
    tracker.close()
    first, last = out.getvalue().splitlines()
    assert first.startswith("step 5/10 · loss 1.5000 · 12,346 tokens/s · MFU 42.1% · 2.2 GiB · 0:00:0")
    assert last.startswith("step 10/10")


def test_progress_on_a_terminal_redraws_one_line():
    out = io.StringIO()
    tracker = ProgressTracker(done=0, steps=2, interval=1.0, console=Console(file=out, force_terminal=True, width=120))
    tracker.log(1, {"loss": 2.0})
    tracker.log(2, {"loss": 1.0})
    tracker.close()
    assert "step 2/2 · loss 1.0000 · 0:00:00 left" in out.getvalue()


def test_a_speedometer_reads_and_counts_anew():
    speed = Speedometer(torch.device("cpu"), flops=2.0, peak=10.0)
    read = speed.read(tokens=100, steps=4)
    with speed.paused():
        pass
    assert read["seconds"] * 4 * read["tokens_per_second"] == pytest.approx(100)
    assert read["mfu"] == pytest.approx(read["tokens_per_second"] / 5)
    assert 0.01 < read["memory_gib"] < 1000
    assert "mfu" not in Speedometer(torch.device("cpu"), flops=2.0).read(tokens=1, steps=1)


def test_the_peak_is_known_by_the_name_of_the_device(monkeypatch):
    gpu = torch.device("cuda", 0)
    for name, peak in {"NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(gpu, torch.bfloat16) == peak
    assert peak_flops(gpu, torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "something else")
    assert peak_flops(gpu, torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


class Collected(Tracker):
    def log(self, step, metrics):
        pass


@attrs.frozen(kw_only=True)
class CollectedConfig(TrackerConfig):
    kind: ClassVar[str] = "collected"

    def open(self, directory, *, done, steps):
        return Collected()


@attrs.frozen(kw_only=True)
class Run:
    trackers: tuple[TrackerConfig, ...] = (JsonLinesConfig(),)


def test_trackers_are_chosen_by_kind_and_a_third_party_may_join(tmp_path: Path):
    run = load(Run, None, ["--trackers", '[{kind = "collected"}, {kind = "progress", interval = 2}]'])
    assert run.trackers == (CollectedConfig(), ProgressConfig(interval=2.0))
    tracker = run.trackers[0].open(tmp_path, done=0, steps=1)
    tracker.flush()
    tracker.close()
