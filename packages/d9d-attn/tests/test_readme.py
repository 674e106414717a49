"""The README's snippets run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from d9d.attn import GroupedQueryAttention, GroupedQueryAttentionConfig, attention_backends, capability_table


def test_readme_shows_the_capability_table():
    assert capability_table() in (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_snippets_run(monkeypatch):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    monkeypatch.setattr(attention_backends, "_classes", dict(attention_backends.classes))
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        exec(compile(snippet, "README.md", "exec"), names)

    config = GroupedQueryAttentionConfig(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True)
    monkeypatch.setenv("D9D_ATTN_BACKEND", '{"kind": "sharp", "sharpness": 1.0}')
    other = GroupedQueryAttention(config)
    other.load_state_dict(names["attention"].state_dict())
    x = torch.randn(2, 8, 64)
    found, expected = (
        which(x, cos=names["cos"], sin=names["sin"], mask=names["mask"]) for which in (other, names["attention"])
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="'sharp', asked for by D9D_ATTN_BACKEND.*has no sinks"):
        GroupedQueryAttention(
            GroupedQueryAttentionConfig(hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, sinks=True)
        )
