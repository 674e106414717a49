"""The command line on what is there: ls, show, diff and verify."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from d9d.ckpt import JobCheckpoints, open_checkpoint


def test_ls(checkpoint, call):
    code, out, err = call("ls", checkpoint)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["name", "dtype", "shape", "bytes", "file"]
    assert [line.split()[0] for line in lines[1:13]] == [f"experts.{e}.weight" for e in range(12)]  # natural order
    assert lines[1].split() == ["experts.0.weight", "F32", "[2,", "3]", "24", "model-00001-of-00002.safetensors"]
    assert lines[-1] == "13 tensors, 304 B in 2 file(s)"


def test_ls_of_some(checkpoint, call):
    code, out, _ = call("ls", checkpoint, "experts.1*.weight", "norm.weight")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == [
        "experts.1.weight",
        "experts.10.weight",
        "experts.11.weight",
        "norm.weight",
    ]
    assert call("ls", checkpoint, "nothing*")[0] == 1


def test_ls_for_programs_and_by_file(checkpoint, call):
    document = json.loads(call("ls", checkpoint, "--json")[1])
    assert document["bytes"] == 304
    assert document["tensors"][-1] == {
        "name": "norm.weight",
        "dtype": "F32",
        "shape": [4],
        "bytes": 16,
        "file": "model-00002-of-00002.safetensors",
    }
    lines = call("ls", checkpoint, "--files")[1].splitlines()
    assert lines[1].split() == ["model-00001-of-00002.safetensors", "12", "288"]


def test_show(checkpoint, call):
    code, out, _ = call("show", checkpoint, "norm.weight", "--values", 3)
    assert code == 0
    data = (checkpoint / "model-00002-of-00002.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert out.splitlines() == [
        "norm.weight",
        "  dtype   F32",
        "  shape   [4]",
        "  bytes   16 (16 B)",
        f"  in      model-00002-of-00002.safetensors [{start}, {start + 16})",
        "  min     -2",
        "  max     5",
        "  mean    1",
        "  std     2.54951",  # the population's
        "  zeros   1",
        "  NaN     0",
        "  inf     0",
        "  values  [1, -2, 0, ...]",
    ]


@pytest.mark.parametrize("tile", [1, 7, 1 << 20])
def test_statistics_are_those_of_the_whole(tmp_path, call, monkeypatch, tile):
    monkeypatch.setattr("d9d.ckpt._tiles.TILE_ELEMENTS", tile)
    values = torch.randn(5, 6) + 1000
    values[2, 3], values[4, 0], values[0, 0] = float("nan"), float("inf"), 0
    save_file({"x": values, "none": torch.empty(0, 2), "c": torch.tensor([3 + 4j])}, tmp_path / "w.safetensors")
    out = call("show", tmp_path, "x")[1]
    finite = values[values.isfinite()].double()
    for label, value in {"min": finite.min(), "mean": finite.mean(), "std": finite.std(correction=0)}.items():
        assert f"  {label:<7} {value:.6g}\n" in out
    assert "NaN     1\n  inf     1\n" in out
    out = call("show", tmp_path, "none", "c")[1]
    assert "none\n  dtype   F32\n  shape   [0, 2]" in out
    assert "values  []" in out
    assert "  max     5\n" in out


def test_diff(checkpoint, tmp_path, call):
    assert call("diff", checkpoint, checkpoint) == (0, "13 tensors are equal, 0 differ\n", "")
    other = {f"experts.{e}.weight": torch.full((2, 3), float(e)) for e in range(1, 12)}
    other["experts.3.weight"][1, 2] = 3.5
    other["experts.4.weight"] = torch.zeros(7)
    other |= {"norm.weights": torch.ones(4)}
    save_file(other, tmp_path / "other.safetensors")
    code, out, _ = call("diff", checkpoint, tmp_path / "other.safetensors")
    assert code == 1
    assert "only in A: 'norm.weight' (nearest: 'norm.weights')" in out
    assert "only in A: 'experts.0.weight'" in out
    assert "only in B: 'norm.weights'" in out
    row = next(line for line in out.splitlines() if line.startswith("experts.3.weight"))
    assert row.split()[-6:] == ["1", "1", "0.5", "0.143", "[1,", "2]"]
    assert "experts.4.weight  [2, 3] float32  [7] float32" in out
    assert out.splitlines()[-1] == "9 tensors are equal, 5 differ"


def test_diff_with_tolerance(tmp_path, call):
    save_file({"a": torch.tensor([1.0, 2.0])}, tmp_path / "a.safetensors")
    save_file({"a": torch.tensor([1.0, 2.1])}, tmp_path / "b.safetensors")
    save_file({"a": torch.tensor([1.0, 2.0]).half()}, tmp_path / "c.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert call("diff", *paths)[0] == 1
    code, out, _ = call("diff", *paths, "--rtol", "0.1")
    assert (code, out.splitlines()[-1]) == (0, "0 tensors are equal, 1 differ within the tolerance, 0 differ")
    assert call("diff", *paths, "--atol", "0.01")[0] == 1
    assert call("diff", paths[0], tmp_path / "c.safetensors")[0] == 1
    assert call("diff", paths[0], tmp_path / "c.safetensors", "--promote")[0] == 0


def test_verify(checkpoint, call):
    assert call("verify", checkpoint) == (0, f"{checkpoint}: 13 tensors of 304 bytes in 2 file(s): sound\n", "")
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    code, out, _ = call("verify", checkpoint)
    assert code == 1
    assert "missing file: the index names 'model-00002-of-00002.safetensors', which is absent" in out


def test_verify_reads_values_when_asked(tmp_path, call):
    save_file({"a": torch.tensor([float("nan")]), "b": torch.ones(3), "c": torch.ones(3)}, tmp_path / "w.safetensors")
    assert call("verify", tmp_path)[0] == 0
    code, out, _ = call("verify", tmp_path, "--values", "--contents")
    assert code == 1
    assert "not finite: 'w.safetensors': 'a' has 1 NaN" in out
    assert "note: equal: ['b', 'c'] hold the same [3] float32" in out


def test_job_checkpoints(checkpoint, tmp_path, call):
    tensors = {name: torch.ones(spec.shape) for name, spec in open_checkpoint(checkpoint).items()}
    JobCheckpoints(tmp_path / "job").save(10, tensors, shared={}, per_rank={"rng": torch.arange(3)})
    job = tmp_path / "job/step-00000010"
    assert call("ls", job)[1].splitlines()[-1] == "13 tensors, 304 B in 1 file(s)"
    out = call("show", job, "norm.weight")[1]
    assert "rank-00000.safetensors [" in out
    assert "elements [0] to [4], crc32 0x" in out
    assert call("verify", job)[0] == 0
    assert call("diff", job, checkpoint)[0] == 1
    assert call("plan", job, "--toml", tmp_path / "experts.toml", "--explain", "experts.weight")[0] == 0
    assert call("convert", job, tmp_path / "out", "--toml", tmp_path / "experts.toml")[0] == 0
    assert load_file(tmp_path / "out/model.safetensors")["experts.weight"].sum() == 12 * 6
    code, _, err = call("ls", tmp_path / "job")
    assert code == 2
    assert err == f"d9d-ckpt: {str(tmp_path / 'job')!r} has 1 job checkpoint(s): name one, such as {str(job)!r}\n"
