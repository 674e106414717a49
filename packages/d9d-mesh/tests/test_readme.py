"""The README's snippet runs as it stands."""

import re
from pathlib import Path


def test_readme_snippet_runs():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
