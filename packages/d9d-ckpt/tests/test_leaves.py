"""Leaves that change values, choose or compute: slices are parts of the whole, inverses undo or are refused."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.ckpt import (
    Apply,
    Cast,
    Chunk,
    Concatenate,
    Constant,
    Dequantize,
    Drop,
    Identity,
    Parallel,
    Region,
    Rename,
    Repeat,
    Reshape,
    SelectChild,
    Sequential,
    Shard,
    Slice,
    Squeeze,
    TensorSpec,
    Tie,
    Untie,
)

sys.path.insert(0, str(Path(__file__).parent))
from mapper_checks import DTYPES, assert_same, check, check_inverse, region_of


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 6), max_size=3), st.sampled_from([torch.bfloat16, torch.float16, torch.float64]), st.data()
)
def test_casts_slice_by_slice_and_back(shape, dtype, data):
    tensors = {"x": torch.randn(shape).to(torch.bfloat16)}
    mapper = Cast("x", "x", dtype=torch.float32, from_dtype=torch.bfloat16)
    made = check(mapper, tensors, data.draw)
    assert torch.equal(made["x"].double(), tensors["x"].double())
    check_inverse(mapper, made, tensors)
    narrow = Cast("x", "y", dtype=dtype)
    assert torch.equal(check(narrow, tensors, data.draw)["y"], tensors["x"].to(dtype))
    with pytest.raises(ValueError, match=r"^Cast\(input='x', output='y', .* has no inverse: give from_dtype"):
        narrow.inverse()
    with pytest.raises(ValueError, match=r"cannot cast 'x', which is .* float64: it should be torch.bfloat16"):
        mapper.infer({"x": TensorSpec([1], torch.float64)})


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 2), max_size=1),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.data(),
)
def test_dequantizes_ragged_blocks_slice_by_slice(batch, shape, block, data):
    rows, columns = shape
    weight = torch.randn(*batch, rows, columns).to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scale = torch.rand(*batch, *grid)
    mapper = Dequantize("l.{i}.w", "l.{i}.w", block=block, dtype=torch.float32)
    tensors = {"l.0.w": weight, "l.0.w_scale_inv": scale}
    made = check(mapper, tensors, data.draw, exact=False)["l.0.w"]
    for index in itertools.product(*(range(length) for length in made.shape)):  # element by element
        *rest, row, column = index
        factor = scale[(*rest, row // block[0], column // block[1])]
        assert made[index] == weight[index].float() * factor
    group = mapper.bind(list(tensors))[0]
    want = region_of(data.draw, "l.0.w", made.shape)
    needs = group.needs(want, {name: TensorSpec.of(tensor) for name, tensor in tensors.items()})
    assert needs[0] == want, "of the weight no byte more than asked"
    for dim, size in ((-2, block[0]), (-1, block[1])):
        first, last = want.offset[dim] // size, (want.offset[dim] + want.shape[dim] - 1) // size
        assert (needs[1].offset[dim], needs[1].shape[dim]) == (first, last - first + 1)
    with pytest.raises(ValueError, match=r"^Dequantize\(input='l.\{i\}.w'.* has no inverse"):
        mapper.inverse()


def test_dequantizes_as_published():
    """128 × 128 blocks, one float32 each, the last ones ragged; bfloat16 comes out."""
    weight, scale = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    made = Dequantize("w.weight", "w.weight").apply({"w.weight": weight, "w.weight_scale_inv": scale})["w.weight"]
    expected = weight.float()
    for row in range(2):
        for column in range(3):
            expected[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128] *= scale[row, column]
    assert_same(made, expected.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (((200, 300), torch.float8_e4m3fn), ((3, 3), torch.float32), r"its shape should be \[2, 3\]"),
        (((200,), torch.float8_e4m3fn), ((2,), torch.float32), "in rows and columns"),
        (((200, 300), torch.int8), ((2, 3), torch.float32), "floating-point"),
    ],
)
def test_dequantize_says_what_does_not_fit(weight, scale, message):
    with pytest.raises(ValueError, match=message):
        Dequantize("w", "w").infer({"w": TensorSpec(*weight), "w_scale_inv": TensorSpec(*scale)})


def test_untying_checks_and_takes_what_is_there():  # case 26
    tie = Tie("embed", ["embedding", "head"])
    weight = torch.tensor([1.0, float("nan")])
    both = {"embedding": weight, "head": weight.clone()}
    assert_same(tie.inverse().apply(both)["embed"], weight)
    for state in (both, {"embedding": weight}, {"head": weight}):
        (group,) = tie.inverse().bind(list(state))
        assert group.inputs == tuple(state)
        assert group.outputs == ("embed",)
        assert_same(group.mapper.apply(state)["embed"], weight)
    untied = {"embedding": weight, "head": weight + 1}
    (group,) = tie.inverse().bind(list(untied))
    with pytest.raises(ValueError, match="'head' differs from 'embedding', to which it is tied"):
        group.mapper.apply(untied)
    want = Region("embed", [0], [1])
    needs = group.needs(want, {name: TensorSpec.of(tensor) for name, tensor in untied.items()})
    with pytest.raises(ValueError, match="'head' differs"):
        group.make(want, {region: untied[region.name][region.slices] for region in needs})
    with pytest.raises(ValueError, match=r"'head' is \[3\] float32, but 'embedding', to which it is tied, \[2\]"):
        group.mapper.infer({"embedding": TensorSpec.of(weight), "head": TensorSpec([3], torch.float32)})
    assert tie.inverse().inverse() == tie
    assert isinstance(tie.inverse(), Untie)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.data())
def test_constants_are_made_and_dropped(shape, dtype, data):
    mapper = Parallel(Constant("c", shape=shape, dtype=dtype, value=1), Identity("x"))
    tensors = {"x": torch.ones(2)}
    made = check(mapper, tensors, data.draw, exact=False)
    assert_same(made["c"], torch.ones(shape).to(dtype))
    check_inverse(mapper, made, tensors)
    assert mapper.inverse().inverse().apply(tensors).keys() == made.keys()


def test_drops_take_and_make_nothing():
    drop = Drop("layers.{i}.inv_freq")
    assert [(group.inputs, group.outputs) for group in drop.bind(["layers.0.inv_freq", "w"])] == [
        (("layers.0.inv_freq",), ())
    ]
    with pytest.raises(ValueError, match=r"^Drop\(input='layers.\{i\}.inv_freq', undo=None\) has no inverse"):
        Parallel(Identity("w"), drop).inverse()
    again = Drop("a", undo=Constant("a", shape=(2,), dtype=torch.int64, value=7))
    assert again.inverse().apply({})["a"].tolist() == [7, 7]


def swap_halves(x):
    return [x.flip(0)]


def test_functions_take_whole_inputs_and_may_have_an_inverse():
    one_way = Apply(
        ["{i}.a", "{i}.b"],
        ["{i}.c", "{i}.d"],
        lambda a, b: (a @ b, a.sum()),
        specs=lambda a, b: [TensorSpec([a.shape[0], b.shape[1]], a.dtype), TensorSpec([], a.dtype)],
    )
    tensors = {"0.a": torch.randn(2, 3), "0.b": torch.randn(3, 4)}
    (group,) = one_way.bind(list(tensors))
    assert group.inputs == ("0.a", "0.b")
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    outputs = group.mapper.apply(tensors)
    assert group.mapper.infer(specs) == {name: TensorSpec.of(tensor) for name, tensor in outputs.items()}
    want = Region("0.c", [1, 1], [1, 2])
    needs = group.needs(want, specs)
    assert needs == [Region("0.a", [0, 0], [2, 3]), Region("0.b", [0, 0], [3, 4])]
    assert torch.equal(group.make(want, {region: tensors[region.name] for region in needs}), outputs["0.c"][1:, 1:3])
    with pytest.raises(ValueError, match=r"^Apply\(inputs=\('\{i\}.a', '\{i\}.b'\), .* has no inverse"):
        one_way.inverse()
    both_ways = Apply(["x"], ["y"], swap_halves, specs=lambda x: [x], undo=swap_halves, undo_specs=lambda x: [x])
    assert "function=swap_halves" in repr(both_ways)
    check_inverse(both_ways, both_ways.apply({"x": torch.arange(4)}), {"x": torch.arange(4)})
    with pytest.raises(ValueError, match="should make a list of 1, got Tensor"):
        Apply(["x"], ["y"], torch.neg, specs=lambda x: [x]).apply({"x": torch.ones(1)})


def test_functions_within_chains_read_what_their_group_needs():
    function = Apply(["q"], ["r"], swap_halves, specs=lambda x: [x])
    mapper = Sequential(Chunk("qk", ["q", "k"], sizes=(2, 2)), function, Concatenate(["r", "k"], "y", sizes=(2, 2)))
    (group,) = mapper.bind(["qk"])
    x = torch.arange(4)
    assert group.needs(Region("y", [2], [1]), {"qk": TensorSpec.of(x)}) == [Region("qk", [2], [1])]
    want = Region("y", [0], [1])
    assert group.needs(want, {"qk": TensorSpec.of(x)}) == [Region("qk", [0], [4])]
    assert group.make(want, {Region("qk", [0], [4]): x}).tolist() == [1]


def test_all_refusals_of_an_inverse_are_told():
    mapper = Parallel(Cast("a", "a", dtype=torch.bfloat16), Sequential(Drop("b"), Slice("c", "d", start=0, stop=1)))
    with pytest.raises(ValueError, match=r"Cast(.|\n)*Slice(.|\n)*Drop"):
        mapper.inverse()


def test_names_with_braces_pass_through():
    mapper = Sequential(SelectChild("p."), Identity())
    assert mapper.apply({"p.{x}": torch.ones(1)}).keys() == {"{x}"}
    assert Rename("{{x}}", "{a}}}".replace("{a}", "y")).apply({"{x}": torch.ones(1)}).keys() == {"y}"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reshape("a", "b", input_shape=(2, 3), output_shape=(4,)), "differ in their number of elements"),
        (lambda: Reshape("a", "b", input_shape=(-1,), output_shape=(1,)), "must not be negative"),
        (lambda: Slice("a", "b", start=2, stop=2), "stop must be greater than start"),
        (lambda: Slice("a", "b", start=-1, stop=2), "must be >= 0"),
        (lambda: Tie("a", []), "one or more different names"),
        (lambda: Tie("a", ["b", "b"]), "one or more different names"),
        (lambda: Tie("a", "bc"), "several names are a list"),
        (lambda: Constant("a.{i}", shape=(), dtype=torch.bool), "use Repeat"),
        (lambda: Dequantize("a", "b", block=(0, 1)), "positive numbers of rows"),
        (lambda: Apply(["a"], [], list, specs=list), "use Drop"),
        (lambda: Apply([], ["a.{i}"], list, specs=list), "use Repeat"),
        (lambda: Apply(["a"], ["b"], list, specs=list, undo=list), "both undo and undo_specs"),
        (lambda: Repeat("layers.{i}", Identity()), "has a field and ends in a dot"),
        (lambda: Repeat("layers.0.", Identity()), "has a field and ends in a dot"),
        (lambda: Repeat("{a}.{b}.", Identity(), count=2), "with one field"),
        (lambda: Shard(Identity(), index=2, count=2), "less than that, got 2"),
        (lambda: Rename("a}", "b"), "a brace that is meant is doubled"),
        (lambda: Squeeze("a", "b", dim=-1), "must be >= 0"),
    ],
)  # fmt: skip
def test_wrong_leaves_say_what_is_wrong(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
