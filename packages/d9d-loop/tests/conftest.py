"""What tests of the trainer run in: one process, and one thread."""

import pytest
import torch

from d9d.mesh import DistContext, MeshConfig


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ctx():
    with DistContext.launch(MeshConfig(), device_type="cpu") as made:
        yield made
