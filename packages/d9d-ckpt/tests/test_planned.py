"""What a proven plan tells: bytes, parts for ranks, trees, tables and pictures; and that it costs little."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
import torch

from d9d.ckpt import (
    Cast,
    Chunk,
    Concatenate,
    Constant,
    Dequantize,
    Drop,
    Identity,
    Parallel,
    PlanError,
    Prefix,
    Region,
    Rename,
    Repeat,
    Sequential,
    Slice,
    Source,
    Stack,
    TensorSpec,
    Tie,
    Transpose,
    plan,
)
from d9d.ckpt._names import Pattern

BF16, F32 = torch.bfloat16, torch.float32


def f32(*shape):
    return TensorSpec(shape, F32)


class Headers(Source):
    """A checkpoint of which nothing but headers can be had."""

    def __init__(self, specs):
        self.specs = specs

    def __getitem__(self, name: str) -> TensorSpec:
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def file(self, name: str) -> str:
        return "experts.safetensors" if "experts" in name else "rest.safetensors"

    def read(self, region: Region) -> torch.Tensor:
        raise AssertionError(f"planning reads {region}")


SOURCE = Headers(
    {
        "embed": f32(8, 4),
        "inv_freq": f32(3),
        **{
            f"model.layers.{i}.experts.{e}.{w}": f32(3, 4) for i in range(11) for e in range(12) for w in ("gate", "up")
        },
        **{f"model.layers.{i}.norm": TensorSpec([4], BF16) for i in range(11)},
    }
)
LAYER = Parallel(
    Sequential(
        Concatenate(["experts.{e}.gate", "experts.{e}.up"], "experts.{e}.gate_up", sizes=(3, 3)),
        Stack("experts.{e}.gate_up", "gate_up", count=12),
    ),
    Cast("norm", "norm", dtype=F32),
)
MAPPER = Parallel(
    Tie("embed", ["embedding", "head"]),
    Drop("inv_freq"),
    Constant("scale", shape=(), dtype=F32, value=1),
    Repeat("model.layers.{layer}.", LAYER, output="layers.{layer}."),
)
TARGET = {
    "embedding": f32(8, 4),
    "head": f32(8, 4),
    "scale": f32(),
    **{f"layers.{i}.gate_up": f32(12, 6, 4) for i in range(11)},
    **{f"layers.{i}.norm": f32(4) for i in range(11)},
}
PLAN = plan(SOURCE, MAPPER, TARGET)


def test_planning_opens_headers_only():
    assert PLAN.outputs == TARGET
    assert str(PLAN)
    assert PLAN.svg()
    with pytest.raises(PlanError):
        plan(SOURCE, MAPPER, {})


def test_bytes_are_those_of_what_is_read():
    experts = 11 * 12 * 2 * 3 * 4 * 4
    rest = 8 * 4 * 4 + 11 * 4 * 2
    assert PLAN.bytes_by_file == {"experts.safetensors": experts, "rest.safetensors": rest}
    assert PLAN.bytes_to_read == experts + rest
    assert PLAN.peak_bytes == 2 * 12 * 6 * 4 * 4


def test_a_rank_reads_what_its_regions_need():
    mine = [Region("layers.3.gate_up", [4, 2, 0], [2, 2, 3]), Region("embedding", [0, 0], [4, 4])]
    part = PLAN.select(mine)
    assert [group.outputs[-1] for group in part.groups] == ["head", "layers.3.gate_up"]
    assert part.reads[1] == [
        Region(f"model.layers.3.experts.{e}.{w}", [row, 0], [1, 3])
        for e in (4, 5)
        for w, row in (("gate", 2), ("up", 0))
    ]
    assert part.bytes_by_file == {"experts.safetensors": 48, "rest.safetensors": 64}
    assert part.peak_bytes == 128
    assert part == plan(SOURCE, MAPPER, TARGET, select=mine)
    four = [PLAN.select([Region(f"layers.{i}.gate_up", [3 * r, 0, 0], [3, 6, 4]) for i in range(11)]) for r in range(4)]
    assert sum(each.bytes_to_read for each in four) == PLAN.bytes_by_file["experts.safetensors"]


def test_a_stage_reads_its_names_only():  # case 36
    part = PLAN.select(f"layers.{i}.norm" for i in (10, 3))
    assert [group.outputs for group in part.groups] == [("layers.3.norm",), ("layers.10.norm",)]
    assert part.bytes_by_file == {"rest.safetensors": 16}
    assert part.inputs.keys() == {"model.layers.3.norm", "model.layers.10.norm"}
    assert part.select(["layers.3.norm"]).bytes_to_read == 8
    assert PLAN.select([]).bytes_to_read == PLAN.select([]).peak_bytes == 0


def test_selecting_what_is_not_made_lists_all():
    with pytest.raises(PlanError) as caught:
        PLAN.select(["layers.3.nrom", Region("embedding", [0, 0], [9, 4]), Region("head", [0], [8]), "scale"])
    assert caught.value.problems == (
        "selected, but not in the target: 'layers.3.nrom' (nearest: 'layers.3.norm')",
        f"selected, but not within 'embedding', which is [8, 4] float32: {Region('embedding', [0, 0], [9, 4])}",
        "selected, but not within 'head', which is [8, 4] float32: Region(name='head', offset=(0,), shape=(8,))",
    )


def test_a_tensor_that_two_groups_take_is_read_for_each():
    mapper = Parallel(Slice("x", "a", start=0, stop=2), Slice("x", "b", start=1, stop=4))
    planned = plan({"x": f32(4)}, mapper, {"a": f32(2), "b": f32(3)})
    assert planned.bytes_by_file == {"": 20}
    assert planned.reads == ([Region("x", [0], [2])], [Region("x", [1], [3])])


def test_plans_print_as_tables():
    title = "24 groups make 25 tensors: 12.9 kB to read, 2.3 kB at most in a group"
    assert str(PLAN).splitlines()[0] == title
    rows = [re.split(r"  +", line.strip()) for line in str(PLAN).splitlines()[1:]]
    assert rows == [
        ["makes", "each", "count", "by", "from", "reads"],
        ["embedding", "[8, 4] float32", "1", "Tie", "embed", "128 B"],
        ["head", "[8, 4] float32", "1", "Tie", "embed", "0 B"],
        ["layers.{0..10}.gate_up", "[12, 6, 4] float32", "11", "Concatenate → Stack → Rename",
         "model.layers.{0..10}.experts.{0..11}.gate, model.layers.{0..10}.experts.{0..11}.up", "12.7 kB"],
        ["layers.{0..10}.norm", "[4] float32", "11", "Cast", "model.layers.{0..10}.norm", "88 B"],
        ["scale", "[] float32", "1", "Constant", "nothing", "0 B"],
        ["file", "reads"],
        ["experts.safetensors", "12.7 kB"],
        ["rest.safetensors", "216 B"],
    ]  # fmt: skip
    assert repr(PLAN) == "<Plan of 24 groups that make 25 tensors>"


def test_explains_where_a_tensor_comes_from():
    part = PLAN.select([Region("layers.10.gate_up", [4, 2, 0], [8, 2, 4])])
    lines = [
        "layers.10.gate_up [12, 6, 4] float32 at [4:12, 2:4, 0:4] ← Rename",
        "└─ model.layers.10.gate_up [12, 6, 4] float32 at [4:12, 2:4, 0:4] ← Stack(count=12)",
    ]
    for e, corner, bar in ((4, "├─", "│"), (5, "├─", "│"), (11, "└─", " ")):
        name = f"model.layers.10.experts.{e}"
        lines += [
            f"   {corner} {name}.gate_up [6, 4] float32 at [2:4, 0:4] ← Concatenate(sizes=(3, 3))",
            f"   {bar}  ├─ {name}.gate [3, 4] float32 at [2:3, 0:4]: 16 of 48 B of experts.safetensors",
            f"   {bar}  └─ {name}.up [3, 4] float32 at [0:1, 0:4]: 16 of 48 B of experts.safetensors",
            *(["   ├─ … 5 more like these"] if e == 5 else []),
        ]
    assert part.explain("layers.10.gate_up") == "\n".join(lines)
    assert PLAN.explain("layers.0.norm") == (
        "layers.0.norm [4] float32 ← Cast(dtype=float32)\n"
        "└─ model.layers.0.norm [4] bfloat16: all 8 B of rest.safetensors"
    )
    assert PLAN.explain("scale") == "scale [] float32 ← Constant(dtype=float32, value=1), from nothing"
    with pytest.raises(ValueError, match=r"does not make 'layers.0.nrom' \(nearest: 'layers.0.norm'\)"):
        PLAN.explain("layers.0.nrom")


def test_every_tensor_can_be_explained():
    for name in PLAN.outputs:
        assert PLAN.explain(name).startswith(name)


def edges_of(mermaid):
    labels = dict(re.findall(r'^  (n\d+)\(?\[+"(.*)"\]+\)?:::\w+$', mermaid, re.MULTILINE))
    return {(labels[a], labels[b]) for a, b in re.findall(r"^  (n\d+) --> (n\d+)$", mermaid, re.MULTILINE)}


def test_pictures_show_numbered_names_as_one():
    mermaid = PLAN.mermaid()
    assert mermaid.startswith("flowchart LR\n")
    assert edges_of(mermaid) >= {
        ("model.layers.{0..10}.norm<br/>[4] bfloat16", "Cast(dtype=float32) ×11"),
        ("Cast(dtype=float32) ×11", "layers.{0..10}.norm"),
        ("model.layers.{0..10}.experts.{0..11}.gate<br/>[3, 4] float32", "Concatenate(sizes=(3, 3)) ×132"),
        ("Concatenate(sizes=(3, 3)) ×132", "model.layers.{0..10}.experts.{0..11}.gate_up"),
        ("model.layers.{0..10}.experts.{0..11}.gate_up", "Stack(count=12) ×11"),
        ("embed<br/>[8, 4] float32", "Tie"),
        ("Tie", "embedding"),
        ("Tie", "head"),
    }
    syntax = r'flowchart LR|  n\d+(\["[^"]*"\]|\(\["[^"]*"\]\)):::\w+|  n\d+ --> n\d+|  classDef \w+ [\w:#,-]+'
    assert all(re.fullmatch(syntax, line) for line in mermaid.splitlines())


def test_pictures_are_well_formed_whatever_names_are():
    evil = ['<b>&"', "`x`", "]]>", "a\x00b\nc", "{0}", "ä → 漢", "--> n1", "%%{init}%%", "#35;", "\ud800"]
    planned = plan(dict.fromkeys(evil, f32(1)), Identity(), dict.fromkeys(evil, f32(1)))
    root = ET.fromstring(planned.svg().encode())
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert '<b>&"' in texts
    assert "ä → 漢" in texts
    labels = re.findall(r'^  n\d+\["(.*)"\]:::source$', planned.mermaid(), re.MULTILINE)
    assert len(labels) == len(evil)
    assert not any(set(label.replace("<br/>", "")) & set('<>"`&%') for label in labels)
    assert str(planned)
    assert planned.explain("{0}").startswith("{0}")


def test_pictures_lay_nodes_out_from_left_to_right_without_overlap():
    root = ET.fromstring(PLAN.svg())
    boxes = [
        [float(rect.get(key)) for key in ("x", "y", "width", "height")]
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
    ]
    for number, (x, y, w, h) in enumerate(boxes):
        assert x + w <= float(root.get("width"))
        assert y + h <= float(root.get("height"))
        assert not any(x < ox + ow and ox < x + w and y < oy + oh and oy < y + h for ox, oy, ow, oh in boxes[:number])
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        start, *_, end = (float(x) for x in re.findall(r"[M ]([\d.]+) [\d.]+(?=C|$)", path.get("d")))
        assert start < end
    assert not list(ET.fromstring(PLAN.select([]).svg()))


def test_names_that_are_reused_along_a_chain_are_different_nodes():
    mapper = Sequential(Transpose("a", "a"), Chunk("a", ["a", "b"], sizes=(1, 2)), Transpose("a", "a"))
    planned = plan({"a": f32(2, 3)}, mapper, {"a": f32(2, 1), "b": f32(2, 2)})
    texts = [text.text for text in ET.fromstring(planned.svg()).iter("{http://www.w3.org/2000/svg}text")]
    assert (texts.count("a"), texts.count("b")) == (4, 1)
    assert planned.explain("a").count("\n") == 3
    assert planned.explain("b").count("\n") == 2


def test_problems_of_one_mapper_do_not_hide_those_of_others():
    class Broken:
        def bind(self, names):
            raise ValueError("Broken cannot be bound")

    mapper = Sequential(
        Parallel(Rename("a", "b"), Broken(), Rename("x", "y")),
        Rename("a", "c"),
        Prefix("p.", Sequential(Rename("q", "r"), Rename("s", "r"), Transpose("t", "t"))),
    )
    source = {"a": f32(1), "p.q": f32(1), "p.s": f32(1), "p.t": f32(2)}
    with pytest.raises(PlanError) as caught:
        plan(source, mapper, {"b": f32(2), "p.t": f32(2)})
    found = "\n".join(caught.value.problems)
    for part in (
        "Broken cannot be bound",
        "Rename(input='a', output='c') takes ['a'], which an earlier mapper took",
        "under 'p.': Rename(input='s', output='r') makes ['r'], which exist already",
        "under 'p.': cannot exchange dims (0, 1) of 't', which is [2] float32",
        "needed, but not in the source: 'x'",
        "made as [1] float32, but the target has [2] float32: 'b'",
    ):
        assert part in found, found


def test_within_a_chain_all_shapes_are_checked_though_an_input_is_missing():
    source = {f"{w}.{e}": f32(3 if e != 5 else 4, 2) for w in "ab" for e in range(8) if (w, e) != ("a", 2)}
    mapper = Sequential(
        Concatenate(["a.{e}", "b.{e}"], "c.{e}", sizes=(3, 3)), Stack("c.{e}", "d", count=8), Transpose("d", "d")
    )
    with pytest.raises(PlanError) as caught:
        plan(source, mapper, {"d": f32(6, 8, 2)})
    assert len(caught.value.problems) == 3
    assert sum("'a.5'" in problem or "'b.5'" in problem for problem in caught.value.problems) == 2
    assert caught.value.problems[-1] == "needed, but not in the source: 'a.2'"


def test_a_leaf_that_infers_other_names_than_it_binds_is_a_problem():
    class Liar(Rename):
        def infer(self, specs):
            return {"other": f32(1)}

    with pytest.raises(PlanError, match=r"is bound to make \['b'\], but infers \['other'\]"):
        plan({"a": f32(1)}, Liar("a", "b"), {"b": f32(1)})


def fp8_experts(layers, experts):
    weights = {"gate": (256, 384), "up": (256, 384), "down": (384, 256)}
    source = {}
    for layer in range(layers):
        for expert in range(experts):
            for name, (rows, columns) in weights.items():
                full = f"model.layers.{layer}.experts.{expert}.{name}.weight"
                source[full] = TensorSpec([rows, columns], torch.float8_e4m3fn)
                source[full + "_scale_inv"] = f32(rows // 128, columns // 128)
    return source


def expert_leaves(prefix, experts):
    each = prefix + "experts.{e}."
    return Sequential(
        Parallel(*(Dequantize(f"{each}{w}.weight", f"{each}{w}.weight") for w in ("gate", "up", "down"))),
        Concatenate([f"{each}gate.weight", f"{each}up.weight"], f"{each}gate_up", sizes=(256, 256)),
        Parallel(
            Stack(f"{each}gate_up", f"{prefix}gate_up", count=experts),
            Stack(f"{each}down.weight", f"{prefix}down", count=experts),
        ),
    )


@pytest.mark.parametrize("form", ["patterns", "layers", "leaf by leaf", "nested prefixes"])
def test_work_grows_with_names_not_with_names_times_patterns(form, monkeypatch):
    """At 100,000 names the difference is that between seconds and hours: tools/bench_plan.py measures those."""
    looked_at = 0
    match = Pattern.match

    def counting(self, name):
        nonlocal looked_at
        looked_at += 1
        return match(self, name)

    monkeypatch.setattr(Pattern, "match", counting)
    layers, experts = 24, 16
    source = fp8_experts(layers, experts)
    mapper = {
        "patterns": lambda: expert_leaves("model.layers.{l}.", experts),
        "layers": lambda: Repeat("model.layers.{l}.", expert_leaves("", experts)),
        "leaf by leaf": lambda: Parallel(*(expert_leaves(f"model.layers.{i}.", experts) for i in range(layers))),
        "nested prefixes": lambda: Parallel(
            *(Prefix("model.", Prefix(f"layers.{i}.", expert_leaves("", experts))) for i in range(layers))
        ),
    }[form]()
    target = {f"model.layers.{i}.gate_up": TensorSpec([experts, 512, 384], BF16) for i in range(layers)}
    target |= {f"model.layers.{i}.down": TensorSpec([experts, 384, 256], BF16) for i in range(layers)}
    assert len(plan(source, mapper, target).groups) == 2 * layers
    assert looked_at <= 2 * len(source)
