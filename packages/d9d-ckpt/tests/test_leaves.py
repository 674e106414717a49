"""Every leaf: slices are parts of the whole, specs are those of what is made, inverses undo or are refused."""

import itertools
import math

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
    Prefix,
    Region,
    Rename,
    Repeat,
    Reshape,
    SelectChild,
    Sequential,
    Shard,
    Slice,
    Squeeze,
    Stack,
    TensorSpec,
    Tie,
    Transpose,
    Unsqueeze,
    Unstack,
    Untie,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn]


def bits(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits(found), bits(expected))


def tensor_of(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=generator).to(torch.float32).to(dtype)


def region_of(draw, name, shape):
    bounds = [sorted(draw(st.tuples(*2 * [st.integers(0, length - 1)]))) for length in shape]
    return Region(name, [low for low, _ in bounds], [high - low + 1 for low, high in bounds])


def check(mapper, tensors, draw, *, exact=True):
    """What a mapper makes of tensors, after comparing specs and drawn regions; `exact` counts what is read."""
    made = {}
    for group in mapper.bind(list(tensors)):
        inputs = {name: tensors[name] for name in group.inputs}
        specs = {name: TensorSpec.of(tensor) for name, tensor in inputs.items()}
        outputs = group.mapper.apply(inputs)
        assert outputs.keys() == set(group.outputs)
        assert group.mapper.infer(specs) == {name: TensorSpec.of(tensor) for name, tensor in outputs.items()}
        for name, output in outputs.items():
            if not output.numel():
                continue
            for _ in range(3):
                want = region_of(draw, name, output.shape)
                needs = group.needs(want, specs)
                read = {region: tensors[region.name][region.slices] for region in needs}
                assert all(tensor.shape == region.shape for region, tensor in read.items()), (
                    "regions lie within tensors"
                )
                assert_same(group.make(want, read), output[want.slices])
                if exact:
                    assert sum(region.numel for region in needs) == want.numel
        made |= outputs
    return made


def check_inverse(mapper, made, tensors):
    restored = Parallel(mapper.inverse()).apply(made)
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(restored[name], tensor)


@st.composite
def moves(draw, name="x", shape=None, dtype=None):  # noqa: C901  # a list of cases
    """A leaf that moves elements, with patterns or without, and the tensors that it takes."""
    if shape is None:
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = dtype or draw(st.sampled_from(DTYPES))
    dim = draw(st.integers(0, len(shape) - 1))
    many = [f"{name}.{i}.w" for i in range(draw(st.integers(1, 11)))]
    kind = draw(st.sampled_from(["rename", "identity", "transpose", "squeeze", "unsqueeze", "reshape", "stack",
                                 "unstack", "concatenate", "chunk", "child", "tie"]))  # fmt: skip
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
        case "squeeze":
            return Squeeze(name, "y", dim=dim), {name: tensor_of([*shape[:dim], 1, *shape[dim:]], dtype)}
        case "unsqueeze":
            return Unsqueeze(name, "y", dim=dim + draw(st.integers(0, 1))), one
        case "reshape":
            return Reshape(name, "y", input_shape=shape, output_shape=draw(reshaped(math.prod(shape)))), one
        case "stack":
            return Stack(name + ".{i}.w", "y", count=len(many), dim=dim), several
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
