"""Which layers a stage holds, and parameters that several stages hold."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import WorldError, run_world
from d9d.parallel import GradientSync, global_norm, parallelize_replicate
from d9d.parallel.pipeline._layers import distribute_layers
from d9d.parallel.pipeline._tied import TiedParameters


def test_the_head_takes_the_place_of_a_layer():
    assert [len(layers) for layers in distribute_layers(15, 4, last=0.9)] == [4, 4, 4, 3]
    assert [len(layers) for layers in distribute_layers(15, 8, last=0.9)] == [2, 2, 2, 2, 2, 2, 2, 1]
    assert distribute_layers(5, 2) == (range(2), range(2, 5))


@given(st.integers(1, 6), st.integers(0, 12), st.floats(0, 3), st.floats(0, 3))
def test_no_other_cut_has_a_cheaper_most_expensive_stage(stages, more, first, last):
    layers = stages + more

    def cost(counts):
        costs = list(map(float, counts))
        costs[0] += first
        costs[-1] += last
        return max(costs)

    def cuts(left, parts):
        if parts == 1:
            yield (left,)
            return
        for count in range(1, left - parts + 2):
            for rest in cuts(left - count, parts - 1):
                yield count, *rest

    found = distribute_layers(layers, stages, first=first, last=last)
    assert [i for stage in found for i in stage] == list(range(layers))
    assert cost(map(len, found)) <= min(map(cost, cuts(layers, stages))) + 1e-9


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"3 layers do not make 4 stages"):
        distribute_layers(3, 4)


class Stage(nn.Module):
    def __init__(self, fill: float, *names: str, width: int = 3) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full((2,), fill, dtype=torch.float64))
        self.names = names
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((4, width), fill, dtype=torch.float64)))

    def forward(self, x):
        shared = sum((getattr(self, name).sum() for name in self.names), torch.zeros((), dtype=torch.float64))
        return x * (self.own.sum() + shared)

    def tied_parameters(self):
        return {name: name for name in self.names}


# Six stages on two ranks, as a V of three turns: the middle one on one rank, the ends on one.
HELD = {0: ("weight",), 1: ("norm",), 2: (), 3: ("weight",), 4: ("norm", "weight"), 5: ("lonely",)}
RANK_OF = {0: 0, 1: 1, 2: 1, 3: 0, 4: 0, 5: 1}


def _train_ties() -> tuple[dict, float, int]:
    config = MeshConfig(pipeline=2, replicate=2)
    with DistContext.launch(config, "cpu") as context:
        mesh = context.mesh("dense")
        pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_replicate")
        stages = {s: Stage(float(s + 1), *names) for s, names in HELD.items() if RANK_OF[s] == pp}
        for module in stages.values():
            parallelize_replicate(module, mesh["dp_replicate"])
        tied = TiedParameters(stages, mesh.get_group("pp"))
        starts = {
            (s, n): p.to_local()[0, 0].item() for s, m in stages.items() for n, p in m.named_parameters() if p.ndim == 2
        }
        parameters = [list(module.parameters()) for module in stages.values()]
        sync = GradientSync(parameters, grad_dtype=torch.float64)
        for index, (stage, module) in enumerate(stages.items()):
            with sync.microbatch(index, last=True):
                module(torch.tensor(float((stage + 1) * (dp + 1)), dtype=torch.float64)).backward()
        sync.finish()
        tied.sum_gradients()
        gradients = {
            (s, n): p.grad.to_local()[0, 0].item()
            for s, m in stages.items()
            for n, p in m.named_parameters()
            if p.ndim == 2
        }
        norm = global_norm(itertools.chain(*parameters), pp_group=mesh.get_group("pp"), tied=tied.copies)
        return {"starts": starts, "gradients": gradients}, norm.item(), len(tied.copies)


def test_copies_start_equal_and_get_the_sum_of_their_gradients():
    ranks = run_world(4, _train_ties)
    starts = {key: value for found, _, _ in ranks for key, value in found["starts"].items()}
    gradients = {key: value for found, _, _ in ranks for key, value in found["gradients"].items()}
    assert {key: value for key, value in starts.items() if key[1] == "weight"} == {
        (0, "weight"): 1.0, (3, "weight"): 1.0, (4, "weight"): 1.0,
    }  # fmt: skip
    assert starts[4, "norm"] == starts[1, "norm"] == 2.0
    assert starts[5, "lonely"] == 6.0
    # Data ranks see x and 2x, stages 1 to 6 times that.
    assert {gradients[s, "weight"] for s in (0, 3, 4)} == {3.0 * (1 + 4 + 5)}
    assert {gradients[s, "norm"] for s in (1, 4)} == {3.0 * (2 + 5)}
    assert gradients[5, "lonely"] == 3.0 * 6
    own = sum(2 * (3.0 * (s + 1)) ** 2 for s in HELD)
    squares = own + 12 * ((3.0 * 10) ** 2 + (3.0 * 7) ** 2 + (3.0 * 6) ** 2)
    for _, norm, _ in ranks:
        assert norm == pytest.approx(squares**0.5, rel=1e-12)
    assert [copies for _, _, copies in ranks] == [3, 3, 0, 0]


def _tie_unequal() -> None:
    stages = {dist.get_rank(): Stage(1.0, "weight", width=3 + dist.get_rank())}
    TiedParameters(stages, dist.group.WORLD)


def test_copies_of_different_shapes_are_refused():
    with pytest.raises(
        WorldError, match=r"copies of the tied parameter 'weight' differ.*stage 0.*\(4, 3\).*stage 1.*\(4, 4\)"
    ):
        run_world(2, _tie_unequal)
