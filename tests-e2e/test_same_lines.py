"""Lines that stand in two packages, which share none below them, are changed in both."""

from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"


@pytest.mark.parametrize("name", ["_constant.py", "_operator.py", "_registry.py"])
def test_attention_and_experts_say_the_same(name):
    of_attention, of_experts = (
        (PACKAGES / f"d9d-{package}/src/d9d/{package}/{name}").read_text() for package in ("attn", "moe")
    )
    assert of_attention == of_experts
