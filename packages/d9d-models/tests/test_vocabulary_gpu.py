"""A split vocabulary over NCCL and, through the host, over gloo."""

from pathlib import Path

import pytest

from d9d.mesh.testing import run_on_gpus


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2), ("nccl", 2), ("nccl", 4)])
def test_a_split_vocabulary_gives_loss_and_gradients_of_the_whole(backend, ranks):
    run_on_gpus(Path(__file__).with_name("nccl_vocabulary.py"), backend, ranks=ranks)
