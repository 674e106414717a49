"""A mapper for every layer, and its share for each of several workers."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.ckpt import Concatenate, Identity, Parallel, Prefix, Repeat, Sequential, Shard, Stack, Transpose

sys.path.insert(0, str(Path(__file__).parent))
from mapper_checks import check, check_inverse, tensor_of

LAYER = Sequential(
    Concatenate(["experts.{e}.gate", "experts.{e}.up"], "experts.{e}.fused", sizes=(2, 2)),
    Parallel(Stack("experts.{e}.fused", "fused", count=3), Transpose("router", "router")),
)


def layers(count):
    return {
        f"model.layers.{layer}.{name}": tensor_of((2, 3), torch.float32, layer * 10 + seed)
        for layer in range(count)
        for seed, name in enumerate(["router", *(f"experts.{e}.{w}" for e in range(3) for w in ("gate", "up"))])
    }


@settings(deadline=None, max_examples=5)
@given(st.data())
def test_layers_read_what_they_are_asked_for(data):
    check(Repeat("model.layers.{layer}.", LAYER, output="layers.{layer}."), layers(2), data.draw)


def test_layers_repeat_by_names_or_count():
    tensors = layers(12)
    by_names = Repeat("model.layers.{layer}.", LAYER, output="layers.{layer}.")
    made = by_names.apply(tensors)
    assert made.keys() == {f"layers.{layer}.{name}" for layer in range(12) for name in ("fused", "router")}
    check_inverse(by_names, made, tensors)
    by_prefix = Parallel(*(Prefix(f"model.layers.{n}.", LAYER, output=f"layers.{n}.") for n in range(12)))
    expected = by_prefix.apply(tensors)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)
    counted = Repeat("model.layers.{layer}.", LAYER, output="layers.{layer}.", count=12)
    assert {g.outputs: g.inputs for g in counted.bind(tensors)} == {g.outputs: g.inputs for g in by_names.bind(tensors)}


def test_repeat_with_a_count_misses_layers():
    counted = Repeat("layers.{i}.", Identity("w"), count=2)
    assert [group.inputs for group in counted.bind(["layers.0.w", "layers.5.w"])] == [("layers.0.w",), ("layers.1.w",)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_shares_are_disjoint_balanced_and_whole(count):
    tensors = layers(12)
    whole = Repeat("model.layers.{layer}.", LAYER)
    makers = {name: group for group in whole.bind(tensors) for name in group.outputs}
    shares = [Shard(whole, index=index, count=count).bind(set(tensors)) for index in range(count)]
    made = [[group for group in share if group.outputs] for share in shares]
    outputs = [name for share in made for group in share for name in group.outputs]
    assert sorted(outputs) == sorted(makers)
    assert all(group == makers[name] for share in made for group in share for name in group.outputs)
    for share in shares:
        assert {name for group in share for name in group.inputs} == tensors.keys()
    loads = [sum(len(group.inputs) + 1 for group in share) for share in made]
    assert max(loads) - min(loads) <= 7, "no more than the largest group"
    with pytest.raises(ValueError, match=r"^Shard\(.* has no inverse"):
        Shard(whole, index=0, count=count).inverse()
