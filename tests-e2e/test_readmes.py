"""The Python in READMEs runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md"))]  # those of packages are tested there


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_its_python_runs(readme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for snippet in re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(snippet, str(readme), "exec"), namespace)


def test_there_is_python_in_the_readme():
    assert "```python\n" in READMES[0].read_text(encoding="utf-8")
