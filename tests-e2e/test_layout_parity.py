"""The example computes the same run in every layout: losses, routing and weights of its steps in fp64."""

import pickle
import sys
from pathlib import Path

import attrs
import pytest
import torch

from d9d.mesh import MeshConfig
from d9d.mesh.testing import run_on_gpus, run_world

sys.path.insert(0, str(Path(__file__).parent))
import layout_runs
from layout_runs import base_config, configs_of, train_all

STEPS, STEPS_ON_GPUS = 50, 6
BOTH_WAYS = [MeshConfig(replicate=4, expert=expert) for expert in (1, 2, 4)]
ACCUMULATED = [MeshConfig(shard=4, expert=2), MeshConfig(pipeline=2, replicate=2, expert=2)]
ON_GPUS = [MeshConfig(replicate=4, expert=4), MeshConfig(replicate=2, shard=2, expert=2), *ACCUMULATED]


def assert_one_run(runs, expected):
    for run in runs:
        torch.testing.assert_close(run.losses, expected.losses, rtol=1e-9, atol=0)
        # the number of tokens of each expert of each layer at each step: what a flipped choice would change
        assert torch.equal(run.expert_loads, expected.expert_loads)
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-9, atol=1e-12)


def assert_on_all_ranks(on_ranks, expected):
    assert_one_run([run for runs in on_ranks for run in runs], expected)
    for runs in zip(*on_ranks, strict=True):
        assert {name for run in runs for name in run.weights} == expected.weights.keys()


def test_every_layout_gives_the_run_of_one_process(script: Path, tiny, files):
    base = base_config(script, tiny, steps=STEPS)
    alone = configs_of(base, [MeshConfig()], (1, 2))
    layouts = [*configs_of(base, BOTH_WAYS, (1, 2)), *configs_of(base, ACCUMULATED, (2,))]
    [[expected, accumulated]] = run_world(1, train_all, alone, files, timeout=300.0)
    on_ranks = run_world(4, train_all, layouts, files, timeout=300.0)

    # it is a run worth comparing: it learns, every expert has work, and ranks have unequal numbers of labels
    assert expected.losses[-1] < 0.6 * expected.losses[0]
    assert (expected.expert_loads.sum(0) > 0).all()
    per_rank = [[sum(step) for step in runs[0].labels] for runs in on_ranks]
    assert sum(len(set(counts)) > 1 for counts in zip(*per_rank)) > STEPS / 2

    assert_one_run([accumulated], expected)
    assert_on_all_ranks(on_ranks, expected)


@pytest.mark.gpu
def test_every_layout_over_nccl_gives_the_run_of_one_process(script: Path, tiny, files, tmp_path):
    base = attrs.evolve(base_config(script, tiny, steps=STEPS_ON_GPUS), device="cuda")
    [[expected]] = on_gpus(1, configs_of(base, [MeshConfig()], (2,)), files, tmp_path)
    on_ranks = on_gpus(4, configs_of(base, ON_GPUS, (2,)), files, tmp_path)
    assert expected.losses[-1] < expected.losses[0]
    assert_on_all_ranks(on_ranks, expected)


def on_gpus(ranks, configs, files, directory):
    """The runs of each rank."""
    asked = directory / "asked.pickle"
    asked.write_bytes(pickle.dumps((configs, files)))
    run_on_gpus(layout_runs.__file__, str(asked), ranks=ranks)
    return [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
