"""Leaves that move elements, alone and in chains: they read what they are asked for, and have inverses."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.ckpt import (
    Chunk,
    Concatenate,
    Identity,
    Parallel,
    Prefix,
    Region,
    Rename,
    Reshape,
    SelectChild,
    Sequential,
    Slice,
    Squeeze,
    Stack,
    TensorSpec,
    Tie,
    Transpose,
    Unsqueeze,
    Unstack,
)

sys.path.insert(0, str(Path(__file__).parent))
from mapper_checks import DTYPES, assert_same, check, check_inverse, tensor_of


@st.composite
def moves(draw, name="x", shape=None, dtype=None):  # noqa: C901  # a list of cases
    """A leaf that moves elements, with patterns or without, or a chain of some, and the tensors that it takes."""
    if shape is None:
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = dtype or draw(st.sampled_from(DTYPES))
    dim = draw(st.integers(0, len(shape) - 1))
    many = [f"{name}.{i}.w" for i in range(draw(st.integers(1, 11)))]
    kind = draw(st.sampled_from(["rename", "identity", "transpose", "transposes", "squeeze", "unsqueeze", "reshape",
                                 "stack", "unstack", "concatenate", "chunk", "child", "tie", "chain"]))  # fmt: skip
    several = {each: tensor_of(shape, dtype, seed) for seed, each in enumerate(many)}
    one = {name: tensor_of(shape, dtype)}
    match kind:
        case "rename":
            return Rename(name + ".{i}.w", "y.{i}"), several
        case "identity":
            return Identity(name + ".{i}.w"), several
        case "child":
            return SelectChild(name + "."), several
        case "tie":
            return Tie(name + ".{i}.w", ["a.{i}", "b.{i}", "c.{i}"]), several
        case "transpose":
            return Transpose(name, name, dims=(dim, draw(st.integers(0, len(shape) - 1)))), one
        case "transposes":
            return Transpose(name + ".{i}.w", "y.{i}", dims=(dim, draw(st.integers(0, len(shape) - 1)))), several
        case "squeeze":
            return Squeeze(name, "y", dim=dim), {name: tensor_of([*shape[:dim], 1, *shape[dim:]], dtype)}
        case "unsqueeze":
            return Unsqueeze(name, "y", dim=dim + draw(st.integers(0, 1))), one
        case "reshape":
            return Reshape(name, "y", input_shape=shape, output_shape=draw(reshaped(math.prod(shape)))), one
        case "stack":
            return Stack(name + ".{i}.w", "y", count=len(many), dim=dim + draw(st.integers(0, 1))), several
        case "unstack":
            return Unstack(name, "y.{i}", count=shape[dim], dim=dim), one
        case "chunk":
            cuts = sorted(draw(st.sets(st.integers(1, shape[dim] - 1)))) if shape[dim] > 1 else []
            sizes = [b - a for a, b in itertools.pairwise([0, *cuts, shape[dim]])]
            return Chunk(name, [f"y.{i}" for i in range(len(sizes))], sizes=sizes, dim=dim), one
        case "concatenate":
            sizes = [draw(st.integers(1, 3)) for _ in many]
            pieces = {
                each: tensor_of([*shape[:dim], size, *shape[dim + 1 :]], dtype, size) for each, size in zip(many, sizes)
            }
            return Concatenate(many, "y", sizes=sizes, dim=dim), pieces
        case "chain":
            mapper = Sequential(
                Transpose(name + ".{i}.w", "t.{i}", dims=(0, len(shape) - 1)),
                Stack("t.{i}", "s", count=len(many)),
                Unstack("s", "u.{i}", count=len(many)),
                Concatenate([f"u.{i}" for i in reversed(range(len(many)))], "y", sizes=[shape[-1]] * len(many)),
            )
            return mapper, several


@st.composite
def reshaped(draw, numel):
    """A shape with that many elements."""
    shape = []
    while numel > 1 and draw(st.integers(0, 3)):
        shape.append(draw(st.sampled_from([d for d in range(1, numel + 1) if numel % d == 0])))
        numel //= shape[-1]
    return [*shape, *([numel] if numel > 1 else draw(st.lists(st.just(1), max_size=2)))]


@settings(deadline=None, max_examples=150)
@given(moves(), st.sampled_from(["", "p.", "model.layers.3."]), st.data())
def test_moves_read_what_they_are_asked_for_and_have_inverses(move, prefix, data):
    mapper, tensors = move
    if prefix:
        mapper = Prefix(prefix, mapper, output=data.draw(st.sampled_from([prefix, "", "q."])))
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    check_inverse(mapper, check(mapper, tensors, data.draw), tensors)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_chains_of_moves_read_what_they_are_asked_for_and_have_inverses(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    first, tensors = data.draw(moves(dtype=dtype))
    mappers, there = [first], Parallel(first).apply(tensors)
    for step in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(sorted(there)))
        if not there[name].ndim:
            break
        leaf, taken = data.draw(moves(shape=there[name].shape, dtype=dtype))
        if list(taken) != ["x"] or taken["x"].shape != there[name].shape:
            continue  # needs other inputs than there are
        made = Parallel(leaf).apply({"x": there.pop(name)})
        mappers += [Rename(name, f"{step}.x"), Prefix(f"{step}.", leaf)]
        there |= {f"{step}.{each}": tensor for each, tensor in made.items()}
    mapper = Sequential(*mappers)
    made = check(mapper, tensors, data.draw)
    assert made.keys() == there.keys()
    for name, tensor in there.items():
        assert_same(made[name], tensor)
    check_inverse(mapper, made, tensors)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_reshapes_of_any_shapes_read_exactly(data):
    numel = data.draw(st.sampled_from([1, 2, 6, 12, 24, 30, 36, 64]))
    first, second = data.draw(reshaped(numel)), data.draw(reshaped(numel))
    tensors = {"x": tensor_of(first, torch.int16)}
    mapper = Reshape("x", "y", input_shape=first, output_shape=second)
    check_inverse(mapper, check(mapper, tensors, data.draw), tensors)


def test_reshape_of_whole_rows_is_one_region():
    heads = Reshape("q", "h", input_shape=(12, 5), output_shape=(4, 3, 5))
    assert heads.pull(Region("h", [1, 0, 0], [2, 3, 5])) == [Region("q", [3, 0], [6, 5])]
    assert heads.pull(Region("h", [1, 1, 2], [1, 2, 3])) == [Region("q", [4, 2], [2, 3])]
    assert heads.inverse().pull(Region("q", [3, 1], [6, 2])) == [Region("h", [1, 0, 1], [2, 3, 2])]


def test_reshape_into_countless_pieces_reads_the_whole():
    flat = Reshape("x", "y", input_shape=(100_000, 2), output_shape=(200_000,))
    assert flat.inverse().pull(Region("x", [0, 0], [100_000, 1])) is None
    group = flat.inverse().bind(["y"])[0]
    y = torch.arange(200_000)
    want = Region("x", [5, 1], [99_000, 1])
    needs = group.needs(want, {"y": TensorSpec.of(y)})
    assert torch.equal(group.make(want, {needs[0]: y})[:, 0], y[1::2][5:99_005])


def test_empty_tensors_reshape():
    mapper = Reshape("x", "y", input_shape=(0, 4), output_shape=(2, 0))
    assert mapper.apply({"x": torch.empty(0, 4)})["y"].shape == (2, 0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_slices_of_slices(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, shape[dim]))
    x = tensor_of(shape, torch.int16)
    mapper = Sequential(Slice("x", "y", start=start, stop=stop, dim=dim), Unsqueeze("y", "z", dim=0))
    made = check(mapper, {"x": x}, data.draw)
    assert torch.equal(made["z"][0], x.index_select(dim, torch.arange(start, stop)))
    with pytest.raises(ValueError, match=r"^Slice\(input='x', output='y', .* has no inverse"):
        mapper.inverse()
