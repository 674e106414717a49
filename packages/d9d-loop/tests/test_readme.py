import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_snippet_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(snippet, str(README), "exec"), {"__name__": "readme"})
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 20
