"""The README's snippets run as they stand."""

import re
from pathlib import Path

from d9d.parallel.certify.__main__ import main

README = (Path(__file__).parents[1] / "README.md").read_text()
TRAINING, CERTIFIED = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_training_loop_runs():
    exec(compile(TRAINING, "README.md", "exec"), {})


def test_the_model_is_certified_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_model.py").write_text(CERTIFIED)
    monkeypatch.syspath_prepend(str(tmp_path))
    command, arguments = re.search(r"```\npython -m (\S+) (my_model.*?)\n```", README).groups()
    assert command == main.__module__.removesuffix(".__main__")
    assert main(arguments.split()) == 0
    assert "3 passed, 0 failed, 0 refused" in capsys.readouterr().out
