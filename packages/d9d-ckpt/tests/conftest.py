"""A checkpoint of two files, and the command line in process."""

import json

import pytest
import torch
from safetensors.torch import save_file

from d9d.ckpt._cli import main

INDEX = "model.safetensors.index.json"
EXPERTS = """
[[step]]
kind = "stack"
input = "experts.{e}.weight"
output = "experts.weight"
count = 12
[[step]]
kind = "identity"
"""


@pytest.fixture
def checkpoint(tmp_path):
    """Twelve experts and a norm in two files."""
    directory = tmp_path / "hf"
    directory.mkdir()
    files = {
        "model-00001-of-00002.safetensors": {f"experts.{e}.weight": torch.full((2, 3), float(e)) for e in range(12)},
        "model-00002-of-00002.safetensors": {"norm.weight": torch.tensor([1.0, -2.0, 0.0, 5.0])},
    }
    for file, tensors in files.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 12 * 24 + 16}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    (directory / "config.json").write_text('{"a": 1}')
    (tmp_path / "experts.toml").write_text(EXPERTS)
    return directory


@pytest.fixture
def call(capsys):
    """Runs the command; its exit code, stdout and stderr."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run
