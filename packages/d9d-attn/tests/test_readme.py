"""The README's snippet runs as it stands."""

import re
from pathlib import Path

from d9d.attn import capability_table


def test_readme_shows_the_capability_table():
    assert capability_table() in (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_snippet_runs():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
