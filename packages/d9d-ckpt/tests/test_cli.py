"""The command line, in process: what it prints, and what it says to the shell."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from d9d.ckpt import JobCheckpoints, TensorSpec, open_checkpoint
from d9d.ckpt._cli import main
from d9d.ckpt._cli._output import printable
from d9d.ckpt._describe_bytes import describe_bytes
from d9d.mesh.testing import run_world

INDEX = "model.safetensors.index.json"
EXPERTS = """
[[step]]
kind = "stack"
input = "experts.{e}.weight"
output = "experts.weight"
count = 12
[[step]]
kind = "identity"
"""


@pytest.fixture
def checkpoint(tmp_path):
    """Twelve experts and a norm in two files."""
    directory = tmp_path / "hf"
    directory.mkdir()
    files = {
        "model-00001-of-00002.safetensors": {f"experts.{e}.weight": torch.full((2, 3), float(e)) for e in range(12)},
        "model-00002-of-00002.safetensors": {"norm.weight": torch.tensor([1.0, -2.0, 0.0, 5.0])},
    }
    for file, tensors in files.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 12 * 24 + 16}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    (directory / "config.json").write_text('{"a": 1}')
    (tmp_path / "experts.toml").write_text(EXPERTS)
    return directory


@pytest.fixture
def call(capsys):
    """Runs the command; its exit code, stdout and stderr."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


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
    (tmp_path / "bad.toml").write_text(EXPERTS.replace("12", "14"))
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
    assert "n" in out


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


def test_what_cannot_be_read_is_one_line(tmp_path, call):
    (tmp_path / "w.safetensors").write_bytes(b"")
    for command in (["ls"], ["show"], ["diff"], ["plan"], ["convert"]):
        more = {"show": ["x"], "diff": [tmp_path], "convert": [tmp_path / "out"]}.get(command[0], [])
        code, out, err = call(*command, tmp_path, *more)
        assert (code, out) == (2, "")
        assert "truncated: it has 0 bytes, too few for the length of a header" in err
        assert call(*command, tmp_path / "none", *more)[0] == 2
    assert call("verify", tmp_path)[0] == 1
    assert call("verify", tmp_path / "none")[0] == 2


def test_unknown_names_come_with_the_nearest(checkpoint, call):
    code, _, err = call("show", checkpoint, "norm.weigth", "norm.weight")
    assert (code, err) == (2, "d9d-ckpt: no tensor is called 'norm.weigth' (nearest: 'norm.weight')\n")


@pytest.mark.parametrize("arguments", [[], ["list"], ["ls"], ["diff", "a"], ["ls", "a", "--xyz"]])
def test_wrong_usage(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "usage: d9d-ckpt" in err


def test_help_says_what_exit_codes_mean(call):
    code, out, _ = call("--help")
    assert code == 0
    assert "exit codes: 0 all is well; 1 differences or problems were found; 2" in out


def test_interrupt(checkpoint, call, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("d9d.ckpt._cli._verify.verify", interrupted)
    assert call("verify", checkpoint) == (130, "", "")


def test_names_cannot_move_the_cursor(tmp_path, call):
    save_file({"a\x1b[2J\nb": torch.ones(1), "": torch.ones(1), "é": torch.ones(1)}, tmp_path / "w.safetensors")
    out = call("ls", tmp_path)[1]
    assert "\x1b" not in out
    assert len(out.splitlines()) == 5
    assert [printable(name) for name in ("a", "é", "", " a", "a\n")] == ["a", "é", "''", "' a'", r"'a\n'"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (5 * 10**9, "5 GB")],
)
def test_sizes(nbytes, text):
    assert describe_bytes(nbytes) == text


class Terminal:
    """A stream that says that it is a terminal."""

    def __init__(self, stream):
        self._stream = stream

    def isatty(self):
        return True

    def __getattr__(self, name):
        return getattr(self._stream, name)


def test_tables_on_a_terminal(tmp_path, call, monkeypatch):
    save_file({"[bold]a[/bold]": torch.ones(2, 3)}, tmp_path / "w.safetensors")
    plain = call("ls", tmp_path)[1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout", Terminal(sys.stdout))
    fancy = call("ls", tmp_path)[1]
    assert "\x1b[1m" in fancy  # a bold title
    assert "[bold]a[/bold]" in fancy  # names are no markup
    assert "[2, 3]" in fancy
    assert call("--plain", "ls", tmp_path)[1] == plain
    code, out, _ = call("diff", tmp_path, tmp_path)
    assert (code, out) == (0, "1 tensors are equal, 0 differ\n")
    monkeypatch.setitem(sys.modules, "rich", None)  # without the extra
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call("ls", tmp_path)[1] == plain


def test_a_reader_that_leaves_and_the_module(checkpoint):
    """In a process, as what happens at exit counts: `d9d-ckpt ls | head`, by `python -m`."""
    many = {f"layers.{number}.weight": torch.ones(1) for number in range(5000)}
    save_file(many, checkpoint.parent / "many.safetensors")
    command = [sys.executable, "-m", "d9d.ckpt", "ls", str(checkpoint.parent / "many.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"name")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


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
    assert call("convert", step, tmp_path / "out", "--copy-files")[0] == 0
    assert call("diff", step, tmp_path / "out")[0] == 0
    code, shown, _ = call("show", step / "rank-00000.safetensors", "shared/a")  # a file of its own
    assert code == 0
    assert "rank-00000.safetensors [" in shown
