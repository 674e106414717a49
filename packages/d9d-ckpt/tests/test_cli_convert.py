"""The command line with mappers: plan and convert, in one process and on several ranks."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from d9d.ckpt import JobCheckpoints, TensorSpec, open_checkpoint
from d9d.ckpt._cli import main
from d9d.mesh.testing import run_world


def test_plan(checkpoint, tmp_path, call):
    code, out, err = call("plan", checkpoint, "--toml", tmp_path / "experts.toml")
    assert (code, err) == (0, "")
    assert "experts.weight" in out
    code, out, _ = call("plan", checkpoint, "--toml", tmp_path / "experts.toml", "--explain", "experts.weight")
    assert code == 0
    assert "experts.11.weight" in out
    assert "norm.weight" not in out
    code, out, _ = call("plan", checkpoint, "--toml", tmp_path / "experts.toml", "--mermaid", "-")
    assert code == 0
    assert out.startswith(("flowchart", "graph"))
    assert call("plan", checkpoint, "--toml", tmp_path / "experts.toml", "--svg", tmp_path / "plan.svg")[0] == 0
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    code, _, err = call("plan", checkpoint, "--explain", "norm.wieght")
    assert (code, err) == (2, "d9d-ckpt: the plan does not make 'norm.wieght' (nearest: 'norm.weight')\n")


def test_plan_that_does_not_hold(checkpoint, tmp_path, call):
    (tmp_path / "bad.toml").write_text((tmp_path / "experts.toml").read_text().replace("12", "14"))
    code, out, err = call("plan", checkpoint, "--toml", tmp_path / "bad.toml")
    assert (code, out) == (1, "")
    assert "needed, but not in the source: 'experts.12.weight'" in err
    assert "needed, but not in the source: 'experts.13.weight'" in err
    code, _, err = call("convert", checkpoint, tmp_path / "out", "--toml", tmp_path / "bad.toml")
    assert code == 1
    assert "'experts.13.weight'" in err
    assert not (tmp_path / "out").exists()


MODULE = """
import torch
from d9d.ckpt import Identity, Rename, TensorSpec
mapper = Rename("norm.weight", "n")
number = 3
def make(): return Rename("norm.weight", "n")
def fails(): raise ValueError("on purpose")
def specs(): return {"n": TensorSpec([4], torch.float32)}
tensors = {"n": torch.empty(4, device="meta")}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n = torch.nn.Parameter(torch.empty(5, device="meta"))
odd = {"n": 3}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current directory, and a checkpoint of one tensor."""
    (tmp_path / "cli_mappers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "w.safetensors")
    yield "cli_mappers"
    sys.modules.pop("cli_mappers", None)


@pytest.mark.parametrize("name", ["mapper", "make"])
@pytest.mark.parametrize("target", [None, "specs", "tensors"])
def test_mappers_and_targets_by_import_path(module, call, name, target):
    arguments = [] if target is None else ["--target", f"{module}:{target}"]
    code, out, err = call("plan", "w.safetensors", "--mapper", f"{module}:{name}", *arguments)
    assert (code, err) == (0, "")
    assert ["n", "[4]", "float32", "1", "Rename", "norm.weight", "16", "B"] in [
        line.split() for line in out.splitlines()
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--mapper", "{}:number"], 2, "--mapper cli_mappers:number: a mapper is needed, got 3"),
        (["--mapper", "{}:nothing"], 2, "'cli_mappers:nothing' names nothing"),
        (["--mapper", "no_such_module_:x"], 2, "'no_such_module_' of 'no_such_module_:x' cannot be imported: Modul"),
        (["--mapper", "x"], 2, "an import path is 'module:name', got 'x'"),
        (["--mapper", "{}:fails"], 2, "on purpose"),
        (["--toml", "none.toml"], 2, "none.toml"),
        (["--toml", "cli_mappers.py"], 2, "'cli_mappers.py' describes no mapper: not TOML"),
        (
            ["--mapper", "{}:mapper", "--target", "{}:Model"],
            1,
            "made as [4] float32, but the target has [5] float32: 'n'",
        ),
        (["--target", "{}:odd"], 2, "--target cli_mappers:odd: 'n' should be a tensor or a TensorSpec, is 3"),
        (["--target", "{}:number"], 2, "a module or a mapping of tensors or specs is needed, got 3"),
        (["--target", "w.safetensors", "--mapper", "{}:mapper"], 1, "made, but not in the target: 'n'"),
    ],
)
def test_wrong_mappers_and_targets(module, call, arguments, code, message):
    found, out, err = call("plan", "w.safetensors", *(argument.format(module) for argument in arguments))
    assert (found, out) == (code, "")
    assert err.startswith("d9d-ckpt: ")
    assert message in err


def test_convert_there_and_back(checkpoint, tmp_path, call):
    toml = ["--toml", tmp_path / "experts.toml"]
    code, out, err = call("convert", checkpoint, tmp_path / "stacked", *toml, "--copy-files")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'stacked'}: 2 tensors, 304 B in 1 file(s)\n"
    assert sorted(path.name for path in (tmp_path / "stacked").iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "stacked/model.safetensors")["experts.weight"].shape == (12, 2, 3)
    arguments = [*toml, "--inverse", "--max-shard-size", "100B"]
    assert call("convert", tmp_path / "stacked", tmp_path / "back", *arguments)[0] == 0
    assert len(list((tmp_path / "back").glob("model-*-of-00004.safetensors"))) == 4
    assert call("diff", checkpoint, tmp_path / "back")[0] == 0
    assert call("verify", tmp_path / "back")[0] == 0


def test_convert_casts_drops_and_refuses_to_overwrite(checkpoint, tmp_path, call):
    arguments = ["--toml", tmp_path / "norm.toml", "--waive", "experts.{e}.weight", "--dtype", "bfloat16"]
    (tmp_path / "norm.toml").write_text('[[step]]\nkind = "rename"\ninput = "norm.weight"\noutput = "n"')
    assert call("convert", checkpoint, tmp_path / "out", *arguments)[0] == 0
    assert dict(open_checkpoint(tmp_path / "out")) == {"n": TensorSpec([4], torch.bfloat16)}
    code, _, err = call("convert", checkpoint, tmp_path / "out", *arguments)
    assert code == 2
    assert "exists: remove it or choose another name" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "bfloat"], "argument --dtype: should be one of bool"),
        (["--max-shard-size", "5XB"], "argument --max-shard-size: a size is a number and a unit such as 5GB"),
        (["--max-shard-size", "0"], "argument --max-shard-size: a size is at least one byte"),
        (["--mapper", "a:b", "--toml", "c"], "not allowed with argument"),
    ],
)
def test_convert_options_are_checked(checkpoint, tmp_path, call, arguments, message):
    code, _, err = call("convert", checkpoint, tmp_path / "out", *arguments)
    assert code == 2
    assert message in err


def test_identity_is_the_default(checkpoint, tmp_path, call):
    assert call("convert", checkpoint, tmp_path / "out", "--memory", "1MiB")[0] == 0
    assert call("diff", checkpoint, tmp_path / "out")[0] == 0


def convert_on_all_ranks(directory):
    """As under torchrun, in a group that is there already."""
    arguments = [str(directory / "hf"), str(directory / "out"), "--toml", str(directory / "experts.toml")]
    code = main(["convert", *arguments, "--max-shard-size", "288B"])
    again = main(["convert", *arguments])
    return code, again


def test_convert_on_several_ranks(checkpoint, tmp_path, call):
    """Each rank writes its own file; that the second try fails is said on all."""
    found = run_world(4, convert_on_all_ranks, tmp_path)
    assert found == [(0, 2)] * 4
    assert len(list((tmp_path / "out").glob("model-*-of-00002.safetensors"))) == 2
    back = ["--toml", tmp_path / "experts.toml", "--inverse"]
    assert call("convert", tmp_path / "out", tmp_path / "back", *back)[0] == 0
    assert call("diff", checkpoint, tmp_path / "back")[0] == 0


@pytest.mark.long
def test_convert_under_torchrun(checkpoint, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "d9d.ckpt"]
    arguments = ["convert", checkpoint, tmp_path / "out", "--max-shard-size", "100B"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("13 tensors, 304 B in 4 file(s)") == 1  # said by one rank
    assert main(["diff", str(checkpoint), str(tmp_path / "out")]) == 0


def test_a_manifest_of_others_makes_no_job_checkpoint(checkpoint, tmp_path, call):
    (checkpoint / "manifest.json").write_text('{"name": "theirs"}')
    assert call("ls", checkpoint)[0] == 0
    assert call("verify", checkpoint)[0] == 0
    assert call("convert", checkpoint, tmp_path / "out", "--copy-files")[0] == 0
    assert (tmp_path / "out" / "manifest.json").exists()
    assert call("diff", checkpoint, tmp_path / "out")[0] == 0


def test_the_manifest_of_a_job_is_not_copied_into_a_model(tmp_path, call):
    JobCheckpoints(tmp_path / "job").save(1, {"a": torch.ones(3)}, shared={}, per_rank={})
    step = tmp_path / "job" / "step-00000001"
    (step / "config.json").write_text("{}")
    assert (step / "manifest.json").exists()
    assert call("convert", step, tmp_path / "out", "--copy-files")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert call("diff", step, tmp_path / "out")[0] == 0
    code, shown, _ = call("show", step / "rank-00000.safetensors", "shared/a")  # a file of its own
    assert code == 0
    assert "rank-00000.safetensors [" in shown
