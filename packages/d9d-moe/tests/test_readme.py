"""The README's Python runs as it stands, one snippet after the other."""

import re
from pathlib import Path


def test_readme_snippets_run():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(snippets) == 3
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)
