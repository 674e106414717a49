"""Indexes that nobody vouches for."""

import json
import re

import pytest

from d9d.ckpt._index import inspect_index, read_index

FILE = "model-00001-of-00001.safetensors"


def test_reads_an_index(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 4}, "weight_map": {"b": "10.st", "a": "9.st", "": "9.st"}}))
    index = read_index(path)
    assert index.weight_map == {"b": "10.st", "a": "9.st", "": "9.st"}
    assert (index.files, index.metadata) == (["9.st", "10.st"], {"total_size": 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "malformed: it is no JSON: Expecting value at character 0"),
        ("[]", 'malformed: it needs a "weight_map"'),
        ("{}", 'malformed: it needs a "weight_map"'),
        ('{"weight_map": {}}', 'malformed: it needs a "weight_map"'),
        ('{"weight_map": ["a"]}', 'malformed: it needs a "weight_map"'),
        ('{"weight_map": {"a": 3}}', "malformed: the index has 'a' in 3, which is no name of a file"),
        ('{"weight_map": {"a": null}}', "malformed: the index has 'a' in None"),
        ('{"weight_map": {"a": ["b"]}}', r"malformed: the index has 'a' in \['b'\]"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "duplicate: the index has 'a' more than once"),
        (
            '{"weight_map": {"a": "x"}, "weight_map": {"a": "x"}}',
            "duplicate: the index has 'weight_map' more than once",
        ),
        ('{"weight_map": {"\\ud800": "x"}}', "is no text"),
        ('{"weight_map": {"a": "x"}, "x": NaN}', "no JSON: NaN"),
        ("[" * 100_000, "nested too deep"),
        ('{"weight_map": {"a": "x\\u0000y"}}', r"malformed: 'x\\x00y' is no name of a file"),
        ('{"weight_map": {"a": "\\udc80"}}', r"malformed: '\\udc80' is no name of a file"),
    ],
)
def test_each_fault_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "x.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_index(path)
    assert str(caught.value).startswith(f"{str(path)!r} is no index:\n  ")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", ["..", ".", "../x", "/etc/passwd", "a/b", "a/../../b", "..\\x", "C:\\x"])
def test_names_may_not_leave_the_directory(tmp_path, name):
    (tmp_path / "i").write_text(json.dumps({"weight_map": {"a": name, "b": name}}))
    with pytest.raises(ValueError, match=f"outside: a file outside the directory is named: {re.escape(repr(name))}$"):
        read_index(tmp_path / "i")


@pytest.mark.parametrize("name", ["", "x" * 256, "ü" * 128])
def test_names_must_be_possible(tmp_path, name):
    (tmp_path / "i").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=f"malformed: {name!r} is no name of a file$"):
        read_index(tmp_path / "i")


def test_what_is_sound_is_told_beside_the_faults(tmp_path):
    path = tmp_path / "x.index.json"
    path.write_text(json.dumps({"weight_map": {"a": FILE, "b": "../b", "c": 1, "d": "../b"}, "metadata": 3}))
    index, problems = inspect_index(path)
    assert dict(index.weight_map) == {"a": FILE}
    assert index.metadata == {}
    assert [problem.kind.value for problem in problems] == ["outside", "malformed"]


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b'{"weight_map": {"\xff": "x"}}')
    with pytest.raises(ValueError, match="not UTF-8"):
        read_index(tmp_path / "x")
    with pytest.raises(ValueError, match="no regular file"):
        read_index(tmp_path)
