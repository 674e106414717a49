"""The README's snippet runs, and the public names are there."""

import re
from pathlib import Path

import d9d.ckpt


def test_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = Path(__file__).parents[1] / "README.md"
    scope = {}
    for snippet in re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(snippet, str(readme), "exec"), scope)
    assert sorted(path.name for path in Path("exported").iterdir()) == ["config.json", "model.safetensors"]


def test_public_names_exist_and_are_documented():
    for name in d9d.ckpt.__all__:
        assert name == "JSON" or getattr(d9d.ckpt, name).__doc__, name
