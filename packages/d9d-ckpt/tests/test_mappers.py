"""Mappers: groups, specs, slices and inverses."""

import sys
from pathlib import Path

import pytest
import torch

from d9d.ckpt import (
    Chunk,
    Concatenate,
    Identity,
    Parallel,
    Prefix,
    Region,
    Rename,
    Sequential,
    Stack,
    TensorSpec,
    Transpose,
)

sys.path.insert(0, str(Path(__file__).parent))
from mapper_checks import check, check_inverse

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


def test_qwen3_moe_maps_forth_slice_by_slice_and_back():
    tensors = qwen3_moe_tensors()
    made = check(QWEN3_MOE, tensors)
    check_inverse(QWEN3_MOE, made, tensors)
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


def test_groups_do_not_depend_on_the_order_of_names():
    names = list(qwen3_moe_tensors())
    assert QWEN3_MOE.bind(names) == QWEN3_MOE.bind(names[::-1]) == QWEN3_MOE.bind(set(names))
    outputs = [group.outputs[0] for group in Rename("{n}", "{n}").bind({"w10", "w9", "w1"})]
    assert outputs == ["w1", "w9", "w10"]


def test_swapped_names():
    swap = Sequential(Parallel(Rename("a", "b"), Rename("b", "a")), Transpose("a", "a"))
    tensors = {"a": torch.randn(2, 3), "b": torch.randn(4, 5)}
    made = check(swap, tensors)
    check_inverse(swap, made, tensors)
    assert torch.equal(made["b"], tensors["a"])
    assert torch.equal(made["a"], tensors["b"].T)


def test_sequential_passes_on_what_later_mappers_leave():
    mapper = Sequential(Chunk("qkv", ["q", "k", "v"], sizes=(2, 1, 1)), Transpose("k", "kt"))
    tensors = {"qkv": torch.randn(4, 3)}
    made = check(mapper, tensors)
    assert made.keys() == {"q", "kt", "v"}
    check_inverse(mapper, made, tensors)


def test_sequential_does_not_overwrite_or_take_twice():
    tensors = {"a": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"makes \['b'\], which exist already"):
        Sequential(Rename("a", "b"), Identity()).apply(tensors)
    with pytest.raises(ValueError, match=r"takes \['a'\], which an earlier mapper took"):
        Sequential(Rename("a", "b"), Rename("a", "c")).apply({"a": torch.ones(1)})


def test_what_is_taken_apart_and_put_together_otherwise_is_read_exactly():
    halves, x = Chunk("x", ["a", "b"], sizes=(2, 2)), torch.arange(4)
    mapper = Sequential(halves, Concatenate(["b", "a"], "y", sizes=(2, 2)))
    made = check(mapper, {"x": x})
    assert made["y"].tolist() == [2, 3, 0, 1]
    check_inverse(mapper, made, {"x": x})
    (group,) = mapper.bind(["x"])
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
