"""Peak anonymous memory, in a process of its own: bounded by the largest group, not by the model."""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from d9d.ckpt import Group, Identity, Stack, convert, load, open_checkpoint
from d9d.ckpt._files import TensorFileWriter
from d9d.ckpt._spec import TensorSpec

MIB = 1 << 20


class Doubled:
    """A leaf from outside that no view can stand for."""

    def __init__(self, name=None):
        self.name = name

    def bind(self, names):
        return [Group([name], [name], Doubled(name)) for name in names]

    def infer(self, specs):
        return specs

    def pull(self, want):
        return None

    def apply(self, tensors):
        return {name: tensor * 2 for name, tensor in tensors.items()}


def write(path: Path, count: int, nbytes: int) -> None:
    spec = TensorSpec([nbytes // 4], torch.float32)
    with TensorFileWriter(path, {f"w.{i}": spec for i in range(count)}) as writer:
        for i in range(count):
            writer.write(f"w.{i}", torch.full(spec.shape, float(i)))


def anonymous() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


class Peak:
    """The highest anonymous memory above that at the start, looked at by another thread."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to hide anything
        self.base = self.highest = anonymous()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self):
        while not self.over.wait(0.001):
            self.highest = max(self.highest, anonymous())

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.value = self.highest - self.base


def measure(root: Path, count: int, nbytes: int) -> None:
    """Asserts the bounds for `count` tensors of `nbytes`; prints what was found."""
    torch.set_num_threads(1)
    path = root / "w.safetensors"
    write(path, count, nbytes)
    source = open_checkpoint(path)
    spec = source["w.0"]
    found = {}

    state = {f"w.{i}": torch.zeros(spec.shape) for i in range(count)}
    for name, mapper, group in (("identity", Identity(), nbytes), ("leaf", Doubled(), 2 * nbytes)):
        with Peak() as peak:
            load(source, mapper, state)
        assert state[f"w.{count - 1}"][-1].item() == (count - 1) * (1 + (name == "leaf"))
        found[name] = peak.value, group + 64 * MIB
    with Peak() as peak:  # what the bounds are to find
        held = [tensor.clone() for tensor in state.values()]
    naive = peak.value
    del held, state

    stacked = torch.zeros(count, *spec.shape)
    with Peak() as peak:
        load(source, Stack("w.{i}", "w", count=count), {"w": stacked})
    assert stacked[:, -1].tolist() == list(range(count))
    found["stack in place"] = peak.value, 64 * MIB
    del stacked
    with Peak() as peak:
        convert(source, Stack("w.{i}", "w", count=count), root / "stacked")
    found["convert to one"] = peak.value, 2 * count * nbytes + 64 * MIB
    with Peak() as peak:
        convert(open_checkpoint(root / "stacked"), Stack("w.{i}", "w", count=count).inverse(), root / "unstacked")
    found["convert to many"] = peak.value, count * nbytes + nbytes + 64 * MIB
    with Peak() as peak:
        convert(source, Identity(), root / "same")
    found["convert each"] = peak.value, 2 * nbytes + 64 * MIB
    print({name: f"{value / MIB:.0f} of {bound / MIB:.0f} MiB" for name, (value, bound) in found.items()})  # noqa: T201
    assert naive > found["identity"][1], "the sample is too small to tell"
    assert naive > found["leaf"][1], "the sample is too small to tell"
    for name, (value, bound) in found.items():
        assert value <= bound, (name, value / MIB)


@pytest.mark.parametrize(("count", "nbytes"), [(24, 8 * MIB), pytest.param(32, 64 * MIB, marks=pytest.mark.long)])
def test_memory_is_bounded_by_the_largest_group(tmp_path, count, nbytes):
    subprocess.run([sys.executable, __file__, tmp_path, str(count), str(nbytes)], check=True, timeout=300)


if __name__ == "__main__":
    measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))
