"""The README's snippet and commands run, and the public names are there."""

import re
import shlex
from pathlib import Path

import d9d.ckpt
from d9d.ckpt._cli import main


def test_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = Path(__file__).parents[1] / "README.md"
    scope = {}
    for snippet in re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(snippet, str(readme), "exec"), scope)
    assert sorted(path.name for path in Path("exported").iterdir()) == ["config.json", "model.safetensors"]


def test_commands_run(tmp_path, monkeypatch, capsys):
    test_snippet_runs(tmp_path, monkeypatch)  # makes the checkpoint
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    Path("experts.toml").write_text(toml, encoding="utf-8")
    printed = []
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        assert program == "d9d-ckpt"
        assert main(arguments) == 0, command
        printed.append(capsys.readouterr().out)
    assert [len(printed), printed[-2]] == [7, "25 tensors are equal, 0 differ\n"]
    assert "shape   [12, 8, 8]" in printed[3]
    assert len(list(Path("back").glob("*.safetensors"))) > 1


def test_public_names_exist_and_are_documented():
    for name in d9d.ckpt.__all__:
        assert name == "JSON" or getattr(d9d.ckpt, name).__doc__, name
