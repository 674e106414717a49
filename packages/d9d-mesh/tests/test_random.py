"""Random streams of ranks."""
# ruff: noqa: NPY002 - numpy's global stream is the one to seed and to save

import json
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from d9d.mesh import DistContext, MeshConfig, RandomState, seed_rank
from d9d.mesh.testing import run_world

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_streams():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def _draw() -> tuple[float, float, float, float]:
    """One of each; Python and numpy keep every other Gaussian for later."""
    return torch.rand(()).item(), random.random(), random.gauss(), np.random.standard_normal()


def _through_files(state: dict[str, object]) -> dict[str, object]:
    """What a checkpoint gives back of it."""
    values = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    assert json.loads(json.dumps(values)) == values
    return json.loads(json.dumps(values)) | {n: v.clone() for n, v in state.items() if isinstance(v, Tensor)}


def test_all_streams_go_on_where_they_were():
    streams = RandomState(CPU)
    _draw()
    saved = _through_files(streams.state_dict())
    expected = [_draw() for _ in range(3)]
    torch.manual_seed(17)
    random.seed(17)
    np.random.seed(17)
    RandomState(CPU).load_state_dict(saved)
    assert [_draw() for _ in range(3)] == expected


def test_what_is_drawn_aside_is_not_drawn():
    streams = RandomState(CPU)
    before = streams.state_dict()
    with streams.preserved():
        _draw()
    expected = _draw()
    streams.load_state_dict(before)
    assert _draw() == expected


def test_a_stream_that_was_not_there_goes_on():
    streams = RandomState(CPU)
    saved = {name: value for name, value in streams.state_dict().items() if "numpy" not in name}
    _draw()
    numpy_goes_on = np.random.get_state()
    RandomState(torch.device("cuda")).load_state_dict(saved)  # saved on a host without one
    assert torch.equal(torch.get_rng_state(), saved["torch"])
    assert np.array_equal(np.random.get_state()[1], numpy_goes_on[1])
    with pytest.raises(TypeError, match="holds torch, python and python.rest, and this has .'torch'."):
        streams.load_state_dict({"torch": saved["torch"]})


def _seeded(config: MeshConfig) -> list[tuple[float, ...]]:
    mesh = DistContext.launch(config, "cpu").mesh("batch")
    drawn = []
    for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
        seed_rank(mesh, seed=seed, step=step)
        drawn.append(_draw())
    seed_rank(mesh, seed=0, agree=("dp", "cp", "tp"))
    return [*drawn, _draw()]


def test_data_and_context_ranks_differ_and_tensor_ranks_agree():
    with_tensor = run_world(4, _seeded, MeshConfig(shard=2, tensor=2))
    assert with_tensor[0] == with_tensor[1]
    assert with_tensor[2] == with_tensor[3]
    seeded_apart = [with_tensor[0], with_tensor[2], *run_world(4, _seeded, MeshConfig(replicate=2, context=2))[1:3]]
    for first, other_step, other_seed, again, agreed in seeded_apart:
        assert first == again
        assert agreed == seeded_apart[0][4]
        assert len({first, other_step, other_seed}) == 3
    assert len({first for first, *_ in seeded_apart}) == 3  # (dp 1, cp 0) of both meshes is one place


@pytest.mark.gpu
def test_the_stream_of_the_device_goes_on():
    device = torch.device("cuda", torch.cuda.current_device())
    streams = RandomState(device)
    saved = _through_files(streams.state_dict())
    expected = torch.rand(3, device=device)
    torch.cuda.manual_seed(17)
    streams.load_state_dict(saved)
    assert torch.equal(torch.rand(3, device=device), expected)
