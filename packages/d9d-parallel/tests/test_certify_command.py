"""The certificate's command line, and a function and a package of one name."""

import subprocess
import sys

import pytest

from d9d.parallel.certify.__main__ import main


def test_the_command_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("""
from torch import nn, randn, tensor
from d9d.parallel import LossSum, parallelize_replicate
def build(): return nn.Linear(3, 1)
def lay_out(module, context): parallelize_replicate(module, context.mesh("dense")["dp_replicate"])
def loss(module, x): return LossSum(module(x).square().sum(), tensor(len(x)))
def split(x, index, count): return x.tensor_split(count)[index]
def subject(): return dict(model=build, parallelize=lay_out, loss=loss, split=split, batch=randn(5, 3))
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["mine:subject", "--meshes", "replicate=2", "--parameters"]) == 0
    report = capsys.readouterr().out
    assert "1 passed, 0 failed, 0 refused" in report
    assert [line.split()[0] for line in report.splitlines()[-3:]] == ["parameter", "weight", "bias"]
    assert main(["mine:subject", "--ranks", "2", "--meshes", "replicate=2", "--markdown"]) == 1
    assert "| shard 2 | 2 | failed |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["mine:subject"])
    assert "there is no mesh: give --meshes or --ranks" in capsys.readouterr().err


# One process loads torch once and forks for each order, as torch is nearly all of the time.
_ORDERS = """
import os, sys, torch.distributed.tensor, runpy

def command_line():
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module("d9d.parallel.certify", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0

for order in range(3):
    if os.fork() == 0:
        if order == 0:
            import d9d.parallel.certify
        if order == 1:
            from d9d.parallel.certify import Certificate
        if order == 2:
            command_line()
        from d9d.parallel import certify
        assert certify.__name__ == "certify", certify
        command_line()
        from d9d.parallel import certify as again
        assert again is certify
        sys.exit()
    assert os.wait()[1] == 0
"""


def test_the_name_of_function_and_package_means_the_function_in_any_order():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", _ORDERS]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert found.stdout.count("usage: python -m d9d.parallel.certify") == 4
