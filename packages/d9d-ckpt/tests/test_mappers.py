"""Mappers: groups, specs, slices and inverses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.ckpt import (
    Chunk,
    Concatenate,
    Identity,
    Mapper,
    Parallel,
    Prefix,
    Region,
    Rename,
    Sequential,
    Stack,
    TensorSpec,
    Transpose,
    Unstack,
)

EXPERTS = 12
QWEN3_MOE_LAYER = Parallel(
    Identity("input_layernorm.weight"),
    Rename("mlp.gate.weight", "mlp.router.weight"),
    Sequential(
        Concatenate(
            ["mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"],
            "mlp.experts.{e}.gate_up",
            sizes=(3, 3),
        ),
        Stack("mlp.experts.{e}.gate_up", "mlp.experts.gate_up_proj", count=EXPERTS),
    ),
    Stack("mlp.experts.{e}.down_proj.weight", "mlp.experts.down_proj", count=EXPERTS),
)
QWEN3_MOE = Parallel(
    Rename("model.embed_tokens.weight", "embed.weight"),
    *(Prefix(f"model.layers.{layer}.", QWEN3_MOE_LAYER, output=f"layers.{layer}.") for layer in range(2)),
)


def qwen3_moe_tensors() -> dict[str, torch.Tensor]:
    tensors = {"model.embed_tokens.weight": torch.randn(7, 5).bfloat16()}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = torch.randn(5)
        tensors[prefix + "mlp.gate.weight"] = torch.randn(EXPERTS, 5)
        for expert in range(EXPERTS):
            tensors[prefix + f"mlp.experts.{expert}.gate_proj.weight"] = torch.randn(3, 5)
            tensors[prefix + f"mlp.experts.{expert}.up_proj.weight"] = torch.randn(3, 5)
            tensors[prefix + f"mlp.experts.{expert}.down_proj.weight"] = torch.randn(5, 3)
    return tensors


def specs_of(tensors):
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def assert_sound(mapper: Mapper, tensors: dict[str, torch.Tensor], draw=None) -> dict[str, torch.Tensor]:
    """Checks specs, slices and inverse of a mapper on `tensors`, and returns what it makes of them."""
    made = {}
    for group in mapper.bind(tensors):
        inputs = {name: tensors[name] for name in group.inputs}
        outputs = group.mapper.apply(inputs)
        assert outputs.keys() == set(group.outputs)
        assert group.mapper.infer(specs_of(inputs)) == specs_of(outputs)
        for name, output in outputs.items():
            for want in [Region.whole(name, TensorSpec.of(output)), *some_regions(name, output, draw)]:
                needs = group.needs(want, specs_of(inputs))
                slices = {region: tensors[region.name][region.slices] for region in needs}
                torch.testing.assert_close(group.make(want, slices), output[want.slices], rtol=0, atol=0)
                assert sum(region.numel for region in needs) == want.numel, "nothing but moves: no byte more than asked"
        made |= outputs
    back = mapper.inverse()
    restored = {
        name: tensor
        for group in back.bind(made)
        for name, tensor in group.mapper.apply({name: made[name] for name in group.inputs}).items()
    }
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(restored[name], tensor, rtol=0, atol=0)
    return made


def some_regions(name, tensor, draw):
    if draw is None:
        starts = [length // 2 for length in tensor.shape]
        yield Region(name, starts, [length - start for start, length in zip(starts, tensor.shape)])
    else:
        bounds = [sorted(draw(st.tuples(*2 * [st.integers(0, length - 1)]))) for length in tensor.shape]
        yield Region(name, [low for low, _ in bounds], [high - low + 1 for low, high in bounds])


def test_qwen3_moe_maps_forth_slice_by_slice_and_back():
    tensors = qwen3_moe_tensors()
    made = assert_sound(QWEN3_MOE, tensors)
    for expert in range(EXPERTS):  # case 25: numeric order
        prefix = f"model.layers.1.mlp.experts.{expert}."
        fused = torch.cat([tensors[prefix + "gate_proj.weight"], tensors[prefix + "up_proj.weight"]])
        assert torch.equal(made["layers.1.mlp.experts.gate_up_proj"][expert], fused)
        assert torch.equal(made["layers.1.mlp.experts.down_proj"][expert], tensors[prefix + "down_proj.weight"])


def test_composites_apply_to_whole_states():
    tensors = qwen3_moe_tensors()
    made = QWEN3_MOE.apply(tensors)
    restored = QWEN3_MOE.inverse().apply(made)
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)
    assert QWEN3_MOE.infer(specs_of(tensors)) == specs_of(made)


@st.composite
def moves(draw, names: tuple[str, ...] = ("a", "b", "c")):
    """A mapper over tensors of one shape, and the tensors."""
    rank = draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    tensors = {f"x.{i}": torch.randint(0, 1000, shape) for i in range(draw(st.integers(1, 12)))}
    count = len(tensors)
    dim = draw(st.integers(0, rank - 1))
    match draw(st.integers(0, 6)):
        case 0:
            mapper = Rename("x.{i}", "y.{i}.z")
        case 1:
            mapper = Transpose("x.{i}", "x.{i}", dims=(dim, draw(st.integers(0, rank - 1))))
        case 2:
            mapper = Stack("x.{i}", "y", count=count, dim=draw(st.integers(0, rank)))
        case 3:
            tensors = {"x": torch.stack(list(tensors.values()), dim)}
            mapper = Unstack("x", "y.{i}", count=count, dim=dim)
        case 4 | 5 as kind:
            sizes = [draw(st.integers(1, 4)) for _ in tensors]
            tensors = {
                name: torch.randint(0, 1000, [*shape[:dim], size, *shape[dim + 1 :]])
                for name, size in zip(tensors, sizes)
            }
            mapper = Concatenate(list(tensors), "y", sizes=sizes, dim=dim)
            if kind == 5:
                tensors = {"y": torch.cat(list(tensors.values()), dim)}
                mapper = mapper.inverse()
        case _:
            mapper = Sequential(
                Transpose("x.{i}", "t.{i}", dims=(0, rank - 1)),
                Stack("t.{i}", "s", count=count, dim=0),
                Unstack("s", "u.{i}", count=count, dim=0),
                Concatenate(
                    [f"u.{i}" for i in reversed(range(count))],
                    "y",
                    sizes=[shape[::-1][0] if rank > 1 else shape[0]] * count,
                ),
            )
    return mapper, tensors


@settings(deadline=None, max_examples=50)
@given(moves(), st.data())
def test_moves_commute_with_slicing_and_have_inverses(move, data):
    mapper, tensors = move
    assert_sound(Prefix("p.", mapper), {f"p.{name}": tensor for name, tensor in tensors.items()}, data.draw)


def test_groups_do_not_depend_on_the_order_of_names():
    names = list(qwen3_moe_tensors())
    assert QWEN3_MOE.bind(names) == QWEN3_MOE.bind(names[::-1]) == QWEN3_MOE.bind(set(names))
    outputs = [group.outputs[0] for group in Rename("{n}", "{n}").bind({"w10", "w9", "w1"})]
    assert outputs == ["w1", "w9", "w10"]


def test_swapped_names():
    swap = Sequential(Parallel(Rename("a", "b"), Rename("b", "a")), Transpose("a", "a"))
    a, b = torch.randn(2, 3), torch.randn(4, 5)
    made = assert_sound(swap, {"a": a, "b": b})
    assert torch.equal(made["b"], a)
    assert torch.equal(made["a"], b.T)


def test_sequential_passes_on_what_later_mappers_leave():
    mapper = Sequential(Chunk("qkv", ["q", "k", "v"], sizes=(2, 1, 1)), Transpose("k", "kt"))
    made = assert_sound(mapper, {"qkv": torch.randn(4, 3)})
    assert made.keys() == {"q", "kt", "v"}


def test_sequential_does_not_overwrite_or_take_twice():
    tensors = {"a": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"makes \['b'\], which exist already"):
        Sequential(Rename("a", "b"), Identity()).apply(tensors)
    with pytest.raises(ValueError, match=r"takes \['a'\], which an earlier mapper took"):
        Sequential(Rename("a", "b"), Rename("a", "c")).apply({"a": torch.ones(1)})


def test_what_is_taken_apart_and_put_together_otherwise_is_read_exactly():
    halves = Chunk("x", ["a", "b"], sizes=(2, 2))
    made = assert_sound(Sequential(halves, Concatenate(["b", "a"], "y", sizes=(2, 2))), {"x": torch.arange(4)})
    assert made["y"].tolist() == [2, 3, 0, 1]
    (group,) = Sequential(halves, Concatenate(["b", "a"], "y", sizes=(2, 2))).bind(["x"])
    x = torch.arange(4)
    want = Region("y", [1], [2])
    assert group.needs(want, {"x": TensorSpec.of(x)}) == [Region("x", [3], [1]), Region("x", [0], [1])]
    assert group.make(want, {Region("x", [3], [1]): x[3:], Region("x", [0], [1]): x[:1]}).tolist() == [3, 0]


def test_leaves_print_as_they_are_written():
    mapper = Sequential(Stack("e.{i}.w", "e.w", count=2, dim=1), Prefix("e.", Rename("w", "v")), Identity("e.v"))
    assert repr(mapper) == (
        "Sequential(Stack(input='e.{i}.w', output='e.w', count=2, dim=1), "
        "Prefix(input='e.', mapper=Rename(input='w', output='v'), output='e.'), Identity('e.v'))"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rename("a.{i}", "b"), "same fields"),
        (lambda: Rename("a.{}", "b.{}"), "bare identifier"),
        (lambda: Stack("a", "b", count=2), "one more, which counts"),
        (lambda: Stack("a.{i}.{j}", "b", count=2), "one more, which counts"),
        (lambda: Stack("a.{i}", "b", count=0), "must be >= 1"),
        (lambda: Concatenate(["a", "b"], "c", sizes=(1,)), "2 tensors need as many positive sizes"),
        (lambda: Transpose("a", "b", dims=(0, -1)), "not be negative"),
        (lambda: Rename("a.{i}", "b.{i}").infer({}), "bind the mapper"),
    ],
)
def test_wrong_leaves_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_patterns_stay_between_dots_and_repeat_fields():
    pattern = Rename("layer.{i}.{w}_{i}", "{w}.{i}")
    assert [g.outputs for g in pattern.bind(["layer.1.q_1", "layer.1.q_2", "layer.1.x.q_1"])] == [("q.1",)]
