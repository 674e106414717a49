"""Kernels of norm and rotation: in Triton's interpreter on the CPU. On a GPU: `test_gpu_kernels`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("mark", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_are_right_in_the_interpreter(mark):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    options = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
    command = (sys.executable, "-m", "pytest", *options, "-m", mark, HERE / "kernels_in_interpreter.py")
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
