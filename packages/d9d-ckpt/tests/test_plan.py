"""The coverage proof, tested by planted faults."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.ckpt import (
    Chunk,
    Concatenate,
    Identity,
    Parallel,
    PlanError,
    Prefix,
    Rename,
    Sequential,
    Stack,
    TensorSpec,
    Transpose,
    Unstack,
    plan,
)


def f32(*shape):
    return TensorSpec(shape, torch.float32)


SOURCE = {
    "embed.weight": f32(8, 4),
    **{f"layers.{i}.experts.{e}.up": f32(3, 4) for i in range(11) for e in range(12)},
    "head": f32(4, 8),
}
MAPPER = Parallel(
    Identity("embed.weight"),
    Stack("layers.{i}.experts.{e}.up", "layers.{i}.up", count=12),
    Transpose("head", "head.weight"),
)
TARGET = {
    "embed.weight": f32(8, 4),
    **{f"layers.{i}.up": f32(12, 3, 4) for i in range(11)},
    "head.weight": f32(8, 4),
}


def problems(source=SOURCE, mapper=MAPPER, target=TARGET, **kwargs):
    with pytest.raises(PlanError) as caught:
        plan(source, mapper, target, **kwargs)
    return caught.value.problems


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


def test_valid_plan_is_in_natural_order():
    planned = plan(SOURCE, MAPPER, TARGET)
    assert [group.outputs[0] for group in planned.groups] == [
        "embed.weight",
        "head.weight",
        *(f"layers.{i}.up" for i in range(11)),
    ]
    assert planned.outputs == TARGET


def test_names_that_do_not_meet_are_all_listed():  # case 28
    mapper = Parallel(MAPPER, Rename("bias", "head.wieght.bias"))
    found = problems({**SOURCE, "biass": f32(2)}, mapper, {**TARGET, "head.weight.bias": f32(2)})
    assert found == (
        "needed, but not in the source: 'bias' (nearest: 'biass')",
        "in the source, but neither used nor waived: 'biass'",
        "made, but not in the target: 'head.wieght.bias' (nearest: 'head.weight.bias')",
        "in the target, but not made: 'head.weight.bias' (nearest: 'head.wieght.bias')",
    )


def test_a_wrong_prefix_on_many_names_is_told_in_time():
    names = [f"layers.{i}.weight" for i in range(2000)]
    mapper = Rename("layers.{i}.weight", "model.layers.{i}.weight")
    found = problems(dict.fromkeys(names, f32(1)), mapper, dict.fromkeys(names, f32(1)))
    assert len(found) == 4000
    assert found[0] == "made, but not in the target: 'model.layers.0.weight' (nearest: 'layers.0.weight')"


def test_missing_expert_is_named():
    assert problems(without(SOURCE, "layers.3.experts.11.up")) == (
        "needed, but not in the source: 'layers.3.experts.11.up'",
    )


def test_surplus_expert_is_named_unless_waived():
    more = {**SOURCE, "layers.3.experts.12.up": f32(3, 4)}
    assert problems(more) == ("in the source, but neither used nor waived: 'layers.3.experts.12.up'",)
    assert plan(more, MAPPER, TARGET, waive=["layers.{i}.experts.12.up"]) == plan(SOURCE, MAPPER, TARGET)


def test_two_writers_of_one_tensor():
    (found,) = problems({**SOURCE, "other": f32(8, 4)}, Parallel(MAPPER, Rename("other", "embed.weight")))
    assert found.startswith("made twice: 'embed.weight'")


def test_shapes_and_dtypes():
    wrong = {
        **SOURCE,
        "layers.2.experts.7.up": f32(3, 5),
        "embed.weight": TensorSpec([8, 4], torch.bfloat16),
        "head": f32(4, 9),
    }
    assert problems(wrong) == (
        f"cannot stack 'layers.2.experts.7.up', which is {f32(3, 5)}, on 'layers.2.experts.0.up', which is {f32(3, 4)}",
        "made as [8, 4] bfloat16, but the target has [8, 4] float32: 'embed.weight' (a Cast changes the dtype)",
        "made as [9, 4] float32, but the target has [8, 4] float32: 'head.weight'",
    )


@pytest.mark.parametrize(
    ("mapper", "shapes", "message"),
    [
        (Stack("x.{i}", "y", count=1, dim=2), {"x.0": (2,)}, "cannot stack tensors"),
        (Unstack("x", "y.{i}", count=3), {"x": (2, 2)}, "cannot unstack 3 along dim 0 of 'x', which is [2, 2]"),
        (Chunk("x", ["y"], sizes=[3]), {"x": (2,)}, "cannot cut 'x', which is [2] float32, along dim 0"),
        (Concatenate(["a", "b"], "y", sizes=[1, 1]), {"a": (1,), "b": (2,)}, "cannot concatenate 'b', which is [2]"),
        (Concatenate(["a"], "y", sizes=[1], dim=1), {"a": (1,)}, "cannot concatenate tensors that are [1]"),
        (Transpose("x", "y"), {"x": (2,)}, "cannot exchange dims (0, 1) of 'x'"),
        (Sequential(Rename("a", "b"), Identity()), {"a": (1,), "b": (1,)}, "makes ['b'], which exist already"),
    ],
)
def test_what_cannot_be_mapped_is_a_problem(mapper, shapes, message):
    found = problems({name: f32(*shape) for name, shape in shapes.items()}, mapper, {})
    assert any(message in problem for problem in found), found


def test_select_restricts_what_is_read_but_not_what_is_proven():  # case 36
    planned = plan(SOURCE, MAPPER, TARGET, select=["layers.4.up"])
    assert [group.outputs for group in planned.groups] == [("layers.4.up",)]
    assert problems(without(SOURCE, "head"), select=["layers.4.up"]) == ("needed, but not in the source: 'head'",)
    assert problems(select=["layers.4.upp"]) == (
        "selected, but not in the target: 'layers.4.upp' (nearest: 'layers.4.up')",
    )


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(SOURCE)), st.sampled_from(["hole", "typo", "shape", "dtype"]))
def test_every_planted_fault_is_found(name, fault):
    source = without(SOURCE, name)
    match fault:
        case "typo":
            source[name + "x"] = SOURCE[name]
        case "shape":
            source[name] = f32(*SOURCE[name].shape[:-1], 77)
        case "dtype":
            source[name] = TensorSpec(SOURCE[name].shape, torch.float64)
    told = {"hole": repr(name), "typo": repr(name + "x"), "shape": "77", "dtype": "float64"}[fault]
    assert any(told in problem for problem in problems(source))


def test_prefixes_scope_both_sides():
    mapper = Prefix("model.", Identity(), output="")
    assert plan({"model.a": f32(1)}, mapper, {"a": f32(1)}).groups[0].inputs == ("model.a",)
    assert problems({"a": f32(1)}, mapper, {"a": f32(1)})


def test_patterns_do_not_match_names_that_an_earlier_mapper_took():
    mapper = Sequential(Rename("a.{i}", "b.{i}"), Rename("a.{i}", "c.{i}"), Prefix("a.", Rename("{i}", "d.{i}")))
    assert plan({"a.0": f32(1)}, mapper, {"b.0": f32(1)}).outputs.keys() == {"b.0"}


def test_one_text_is_no_list_of_names():
    source = {"a": TensorSpec([2], torch.float32), "b": TensorSpec([1], torch.float32)}
    planned = plan(source, Identity(), source)
    for call in (
        lambda: plan(source, Identity("a"), {"a": source["a"]}, waive="b*"),  # the letter * would waive everything
        lambda: plan(source, Identity(), source, select="ab"),
        lambda: planned.select("ab"),
    ):
        with pytest.raises(TypeError, match="several names are a list"):
            call()


def test_without_a_target_all_that_is_made_is_wanted():
    assert plan(SOURCE, MAPPER).outputs == TARGET
    with pytest.raises(PlanError) as caught:
        plan({**SOURCE, "more": f32(1)}, MAPPER)
    assert caught.value.problems == ("in the source, but neither used nor waived: 'more'",)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("a/b", MAPPER), {}, r"got the path 'a/b': give open_checkpoint\('a/b'\)"),
        ((SOURCE, MAPPER, {"head.weight": torch.ones(2)}), {}, r"a Tensor for 'head.weight': give TensorSpec.of"),
        ((SOURCE, MAPPER, TARGET), {"select": "head.weight"}, "a list, got the text 'head.weight'"),
        ((SOURCE, MAPPER, TARGET), {"waive": "optimizer.*"}, r"a list, got the text 'optimizer.\*'"),
    ],
)
def test_what_is_given_in_place_of_something_else_is_said(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        plan(*arguments, **options)
