"""Degrees and the domains they make."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d.mesh import MeshConfig, domain_shapes

DEGREES = st.sampled_from([1, 2, 3, 4])


def test_what_is_left_over_is_filled_in():
    assert MeshConfig(replicate=-1, shard=2).resolve(8).replicate == 4
    assert MeshConfig(replicate=2, shard=2, expert=-1).resolve(4).expert == 4


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        ({"replicate": 4, "tensor": 2}, 4, r"replicate 4 × tensor 2\) needs 8 ranks, and 4 were started"),
        ({"replicate": -1, "shard": 3}, 4, r"mesh.replicate = -1 has no value.*groups of 3 ranks, and 4"),
        ({"replicate": 4, "expert": 3}, 4, r"mesh.expert = 3 does not fold.*one of 1, 2, 4"),
        ({"shard": 6, "expert": 4}, 6, r"mesh.expert = 4 does not fold.*one of 1, 2, 3, 6"),
    ],
)
def test_degrees_that_do_not_fit_the_world_are_refused(config, world, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**config).resolve(world)


def test_a_degree_that_is_no_degree_is_refused():
    with pytest.raises(ValueError, match="mesh.shard = 0"):
        MeshConfig(shard=0)
    with pytest.raises(ValueError, match="mesh.replicate and mesh.shard are all -1"):
        MeshConfig(replicate=-1, shard=-1)


@given(pp=DEGREES, replicate=DEGREES, shard=DEGREES, context=DEGREES, tensor=DEGREES, expert=st.integers(1, 64))
def test_experts_fold_exactly_by_the_formula(pp, replicate, shard, context, tensor, expert):
    inner = shard * context * tensor
    config = MeshConfig(pipeline=pp, replicate=replicate, shard=shard, context=context, tensor=tensor, expert=expert)
    world = pp * replicate * inner
    if inner % expert == 0:
        expected = {"ep_replicate": replicate, "ep_shard": inner // expert, "ep": expert}
    elif expert % inner == 0 and replicate % (expert // inner) == 0:
        expected = {"ep_replicate": replicate * inner // expert, "ep_shard": 1, "ep": expert}
    else:
        with pytest.raises(ValueError, match="does not fold"):
            config.resolve(world)
        return
    shapes = domain_shapes(config.resolve(world))
    assert shapes["expert"] == {"pp": pp, **expected}
    assert all(math.prod(dims.values()) == world for dims in shapes.values())
