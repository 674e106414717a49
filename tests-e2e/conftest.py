"""The example's modules, importable in the tests and in the workers of test worlds, and sizes for it to run in ms."""

import random
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen3_moe"
sys.path.insert(0, str(EXAMPLE))

_TINY = """
model.hidden_size 16  model.num_layers 2  model.num_heads 2  model.num_kv_heads 1  model.head_dim 8
model.num_experts 8  model.expert_size 8  trainer.sequence 24  trainer.global_batch 8  trainer.microbatch 2
trainer.schedule.warmup 5  held_out_bytes 4000  device cpu
compare false
"""


@pytest.fixture
def script() -> Path:
    """The example."""
    return EXAMPLE / "pretrain.py"


@pytest.fixture
def tiny(tmp_path) -> list[str]:
    """Its arguments for a tiny model and few bytes a step, in `tmp_path / "run"`."""
    words = _TINY.split()
    sizes = [word for name, value in zip(words[::2], words[1::2]) for word in (f"--{name}", value)]
    return [*sizes, "--trainer.directory", str(tmp_path / "run")]


@pytest.fixture
def files() -> list[bytes]:
    """Contents of small files of unequal lengths, with something to learn in them."""
    rng = random.Random(0)
    words = b"for if in return not self lambda yield".split()
    return [b" ".join(rng.choices(words, k=rng.randint(2, 12))) for _ in range(40)]
