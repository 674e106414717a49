"""What CUDA and NCCL add: streams, and collectives that run beside backward."""

from pathlib import Path

import pytest

from d9d.mesh.testing import run_on_gpus

LAYOUTS = {
    1: ["replicate=1", "shard=1"],
    2: ["replicate=2", "shard=2", "replicate=2,expert=2", "shard=2,expert=2"],
    4: ["replicate=4,expert=2", "replicate=2,shard=2", "replicate=2,shard=2,expert=4", "shard=4,expert=2"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_gives_the_update_of_one_process(world):
    run_on_gpus(Path(__file__).with_name("nccl_steps.py"), *LAYOUTS[world], ranks=world)
