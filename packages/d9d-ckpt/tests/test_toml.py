"""Mappers written as TOML are those written in Python; what is wrong with one is said with its path."""

import attrs
import pytest
import torch

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
    Rename,
    Repeat,
    Reshape,
    SelectChild,
    Sequential,
    Shard,
    Slice,
    Squeeze,
    Stack,
    Tie,
    Transpose,
    Unsqueeze,
    Unstack,
    Untie,
)
from d9d.ckpt import _mappers as mappers
from d9d.ckpt._toml import KINDS, mapper_from_toml, read_toml


@attrs.frozen
class Mine:
    """A leaf of a third party."""

    name: str
    factor: float = 1.0

    bind = infer = pull = assemble = apply = inverse = lambda self, *_: self


WRITTEN = [
    ('kind = "identity"', Identity()),
    ('kind = "identity"\npatterns = ["a", "b.{i}"]', Identity("a", "b.{i}")),
    ('kind = "rename"\ninput = "a.{i}"\noutput = "b.{i}"', Rename("a.{i}", "b.{i}")),
    ('kind = "transpose"\ninput = "a"\noutput = "b"', Transpose("a", "b")),
    ('kind = "transpose"\ninput = "a"\noutput = "b"\ndims = [1, 2]', Transpose("a", "b", dims=(1, 2))),
    ('kind = "stack"\ninput = "a.{i}"\noutput = "a"\ncount = 4\ndim = 1', Stack("a.{i}", "a", count=4, dim=1)),
    ('kind = "unstack"\ninput = "a"\noutput = "a.{i}"\ncount = 4', Unstack("a", "a.{i}", count=4)),
    (
        'kind = "concatenate"\ninputs = ["a", "b"]\noutput = "c"\nsizes = [1, 2]',
        Concatenate(["a", "b"], "c", sizes=(1, 2)),
    ),
    ('kind = "chunk"\ninput = "c"\noutputs = ["a", "b"]\nsizes = [1, 2]', Chunk("c", ["a", "b"], sizes=(1, 2))),
    ('kind = "cast"\ninput = "a"\noutput = "b"\ndtype = "bfloat16"', Cast("a", "b", dtype=torch.bfloat16)),
    (
        'kind = "cast"\ninput = "a"\noutput = "b"\ndtype = "bfloat16"\nfrom_dtype = "float32"',
        Cast("a", "b", dtype=torch.bfloat16, from_dtype=torch.float32),
    ),
    ('kind = "squeeze"\ninput = "a"\noutput = "b"\ndim = 0', Squeeze("a", "b", dim=0)),
    ('kind = "unsqueeze"\ninput = "a"\noutput = "b"\ndim = 0', Unsqueeze("a", "b", dim=0)),
    (
        'kind = "reshape"\ninput = "a"\noutput = "b"\ninput_shape = [4]\noutput_shape = [2, 2]',
        Reshape("a", "b", input_shape=(4,), output_shape=(2, 2)),
    ),
    ('kind = "slice"\ninput = "a"\noutput = "b"\nstart = 1\nstop = 3', Slice("a", "b", start=1, stop=3)),
    ('kind = "tie"\ninput = "a"\noutputs = ["a", "b"]', Tie("a", ["a", "b"])),
    ('kind = "untie"\ninputs = ["a", "b"]\noutput = "a"', Untie(["a", "b"], "a")),
    ('kind = "drop"\ninput = "a.{i}"', Drop("a.{i}")),
    (
        'kind = "constant"\noutput = "a"\nshape = [2]\ndtype = "float32"\nvalue = 1',
        Constant("a", shape=(2,), dtype=torch.float32, value=1.0),
    ),
    ('kind = "dequantize"\ninput = "a"\noutput = "b"\nblock = [2, 2]', Dequantize("a", "b", block=(2, 2))),
    ('kind = "select_child"\nprefix = "model."', SelectChild("model.")),
    (
        'kind = "prefix"\ninput = "a."\noutput = "b."\nmapper = {kind = "identity"}',
        Prefix("a.", Identity(), output="b."),
    ),
    (
        """kind = "prefix"
        input = "a."
        [[step.mapper]]
        kind = "rename"
        input = "x"
        output = "y"
        [[step.mapper]]
        leaf = [{kind = "identity"}]
        """,
        Prefix("a.", Sequential(Rename("x", "y"), Parallel(Identity()))),
    ),
    ('kind = "repeat"\ninput = "l.{i}."\nmapper = {kind = "identity"}', Repeat("l.{i}.", Identity())),
    ('kind = "shard"\nindex = 0\ncount = 2\nmapper = {kind = "identity"}', Shard(Identity(), index=0, count=2)),
    ('kind = "parallel"\nmappers = [{kind = "drop", input = "a"}]', Parallel(Drop("a"))),
    ('kind = "sequential"\nmappers = [{kind = "drop", input = "a"}]', Sequential(Drop("a"))),
    (
        'kind = "apply"\ninputs = ["a"]\noutputs = ["b"]\nfunction = "math:prod"\nspecs = "math:fsum"',
        Apply(["a"], ["b"], __import__("math").prod, specs=__import__("math").fsum),
    ),
    ('kind = "test_toml_leaf:Mine"\nname = "x"\nfactor = 2', "Mine"),
]


@pytest.fixture(autouse=True)
def leaf_of_mine(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "test_toml_leaf", type("Module", (), {"Mine": Mine, "number": 3}))


@pytest.mark.parametrize(("text", "expected"), WRITTEN)
def test_every_kind_is_written(text, expected):
    mapper = mapper_from_toml(f"[[step]]\n{text}")
    assert mapper == Sequential(Mine("x", 2.0) if expected == "Mine" else expected)


def test_all_kinds_are_covered():
    assert {text.split('"')[1] for text, _ in WRITTEN} == {*KINDS, "test_toml_leaf:Mine"}
    assert set(KINDS.values()) == {vars(mappers)[name] for name in mappers.__all__}


def test_steps_follow_and_leaves_stand_side_by_side(tmp_path):
    (tmp_path / "m.toml").write_text("""
        [[step]]  # comments are TOML's
        [[step.leaf]]
        kind = "concatenate"
        inputs = ["{e}.gate", "{e}.up"]
        output = "{e}.gate_up"
        sizes = [4, 4]
        [[step.leaf]]
        kind = "rename"
        input = "norm"
        output = "layer_norm"
        [[step]]
        kind = "stack"
        input = "{e}.gate_up"
        output = "gate_up"
        count = 12
    """)
    assert read_toml(tmp_path / "m.toml") == Sequential(
        Parallel(
            Concatenate(["{e}.gate", "{e}.up"], "{e}.gate_up", sizes=(4, 4)),
            Rename("norm", "layer_norm"),
        ),
        Stack("{e}.gate_up", "gate_up", count=12),
    )


STACK = '[[step]]\nkind = "stack"\ninput = "a.{i}"\noutput = "a"\ncount = 4\n'


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["it needs at least one [[step]]"]),
        ("[[steps]]", ["steps is no key here: a mapper is an array of tables [[step]]"]),
        ("[step]\nkind = 'identity'", ["step should be a table with a kind, in an array [[step]], got {'kind': 'iden"]),
        ("step = [1]", ["step[0] should be a table with a kind, in an array [[step]], got 1"]),
        (
            STACK + '[[step]]\n[[step.leaf]]\nkind = "rename"\ninput = "a"\nouput = "b"',
            [
                "step[1].leaf[0].ouput is no key of 'rename': 'ouput' (nearest: 'output'), of input, output",
                "step[1].leaf[0] is a 'rename' without 'output'",
            ],
        ),
        (STACK + "xyz = 1", ["step[0].xyz is no key of 'stack': 'xyz', of input, output, count, dim"]),
        ('[[step]]\nkind = "stck"', ["step[0].kind is 'stck' (nearest: 'stack'), which is none of apply, cast"]),
        ("[[step]]\ninput = 'a'", ["step[0] needs a kind, a string, got None"]),
        ("[[step]]\nkind = 1", ["step[0] needs a kind, a string, got 1"]),
        ("[[step]]\nkind = 'identity'\nleaf = []", ["step[0].kind is no key of a step with leaves"]),
        ("[[step]]\nleaf = 1", ["step[0].leaf should be a table with a kind, in an array [[step.leaf]], got 1"]),
        (STACK.replace("4", '"4"'), ["step[0].count should be a whole number, got '4'"]),
        (STACK.replace("4", "4.0"), ["step[0].count should be a whole number, got 4.0"]),
        (STACK.replace("4", "true"), ["step[0].count should be a whole number, got True"]),
        (STACK.replace('"a"', "1"), ["step[0].output should be a string, got 1"]),
        (STACK.replace("4", "0"), ["step[0]: 'count' must be >= 1: 0"]),
        (STACK.replace('"a"', '"b.{j}"'), ["step[0]: "]),
        (
            '[[step]]\nkind = "cast"\ninput = "a"\noutput = "b"\ndtype = "bfloat"',
            ["step[0].dtype should be one of bool, uint8"],
        ),
        (
            '[[step]]\nkind = "concatenate"\ninputs = "a"\noutput = "b"\nsizes = [1, "2"]',
            ["step[0].inputs should be an array, got 'a'", "step[0].sizes should be a whole number, got '2'"],
        ),
        (
            '[[step]]\nkind = "prefix"\ninput = "a."\nmapper = {kind = "rename", input = "a"}',
            ["step[0].mapper is a 'rename' without 'output'"],
        ),
        (
            '[[step]]\nkind = "prefix"\ninput = "a."\nmapper = "identity"',
            ["step[0].mapper should be a table with a kind, in an array [[step.mapper]], got 'identity'"],
        ),
        (
            '[[step]]\nkind = "transpose"\ninput = "a"\noutput = "b"\ndims = [1, 2, 3]',
            ["step[0].dims should be an array of 2, got [1, 2, 3]"],
        ),
        (
            '[[step]]\nkind = "d9d.ckpt:TensorSpec"\nshape = [1]\ndtype = "float32"',
            ["step[0].kind is 'd9d.ckpt:TensorSpec', which lacks methods of a mapper"],
        ),
        ('[[step]]\nkind = "no_such_module_:X"', ["step[0].kind: 'no_such_module_' of 'no_such_module_:X' cannot be"]),
        ('[[step]]\nkind = "math:nothing"', ["step[0].kind: 'math:nothing' names nothing"]),
        ('[[step]]\nkind = "math:"', ["step[0].kind: an import path is 'module:name', got 'math:'"]),
        (
            '[[step]]\nkind = "test_toml_leaf:number"',
            ["step[0].kind is 'test_toml_leaf:number', which is no"],
        ),
        (
            '[[step]]\nkind = "apply"\ninputs = ["a"]\noutputs = ["b"]\nfunction = "prod"\nspecs = 1',
            [
                "step[0].function is no function: an import path is 'module:name', got 'prod'",
                "step[0].specs should be an import path 'module:name', got 1",
            ],
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_path(text, problems):
    with pytest.raises(ValueError, match="problem") as caught:
        mapper_from_toml(text)
    lines = str(caught.value).split("\n  ")
    assert lines[0] == f"{len(problems)} problem(s):"
    assert len(lines) == len(problems) + 1, lines
    for line, problem in zip(lines[1:], problems):
        assert line.startswith(problem), line


def test_all_that_is_wrong_is_said_at_once():
    text = '[[step]]\nkind = "x"\n[[step]]\nkind = "rename"\n[[step]]\nkind = "stack"\ncount = 1.5\ninput = "a"\no = 1'
    with pytest.raises(ValueError, match="6 problem") as caught:
        mapper_from_toml(text)
    assert [line.split(" ")[0] for line in str(caught.value).split("\n  ")[1:]] == [
        "step[0].kind",
        "step[1]",
        "step[1]",
        "step[2].o",
        "step[2]",
        "step[2].count",
    ]


def test_the_file_is_named(tmp_path):
    (tmp_path / "m.toml").write_text("a = ")
    with pytest.raises(ValueError, match=r"m\.toml' describes no mapper: not TOML: Invalid value \(at end of document"):
        read_toml(tmp_path / "m.toml")
    (tmp_path / "m.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"m\.toml' describes no mapper: .*utf-8"):
        read_toml(tmp_path / "m.toml")
    with pytest.raises(FileNotFoundError):
        read_toml(tmp_path / "none.toml")
