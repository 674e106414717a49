"""Dispatch over NCCL and, through the host, over gloo."""

from pathlib import Path

import pytest

from d9d.mesh.testing import run_on_gpus


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2), ("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_experts_spread_over_ranks_equal_all_of_them_on_one(backend, ranks):
    run_on_gpus(Path(__file__).with_name("dispatch_on_gpus.py"), backend, ranks=ranks)
