"""Headers of files that nobody vouches for; the `safetensors` library says what else is refused."""

import json
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from d9d.ckpt import TensorSpec
from d9d.ckpt._dtypes import DTYPES
from d9d.ckpt._header import MAX_HEADER_BYTES, Entry, inspect_header, read_header

A = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write(path, header, data=bytes(16), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def reference(path):
    """What the library says is in the file, None where it refuses it."""
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
                for name in file.keys()  # noqa: SIM118
            }
    except SafetensorError:
        return None


SOUND = {
    "one": ({"a": A}, bytes(16)),
    "none": ({}, b""),
    "metadata": ({"__metadata__": {"format": "pt", "ß": ""}, "a": A}, bytes(16)),
    "no metadata": ({"__metadata__": None, "a": A}, bytes(16)),
    "padding": (json.dumps({"a": A}).encode() + b"  \n", bytes(16)),
    "space first": (b"  " + json.dumps({"a": A}).encode(), bytes(16)),
    "any order": ({"b": entry("U8", [2, 3], 16, 22), "a": A}, bytes(22)),
    "misaligned": ({"p": entry("U8", [1], 0, 1), "a": entry("F32", [4], 1, 17)}, bytes(17)),
    "empty tensors": ({"a": A, "y": entry("F32", [0], 0, 0), "z": entry("I8", [0, 3], 16, 16)}, bytes(16)),
    "scalar": ({"a": entry("F64", [], 0, 8)}, bytes(8)),
    "odd names": ({"": entry("U8", [1], 0, 1), "a\0/../b\n": entry("U8", [1], 1, 2)}, bytes(2)),
    "many dims": ({"a": entry("U8", [1] * 100 + [16], 0, 16)}, bytes(16)),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_the_library_opens_is_read_alike(tmp_path, case):
    path = write(tmp_path / "w", *SOUND[case])
    header = read_header(path)
    found = {name: (entry.spec.dtype, entry.spec.shape) for name, entry in header.entries.items()}
    assert found == {name: (DTYPES[dtype], shape) for name, (dtype, shape) in reference(path).items()}
    data = path.read_bytes()
    assert header.nbytes == len(data)
    base = 8 + int.from_bytes(data[:8], "little")
    text = json.loads(data[8:base])
    assert all([e.start - base, e.stop - base] == text[name]["data_offsets"] for name, e in header.entries.items())


REFUSED = {  # header, data, length, what is said
    "no header length": (b"", b"", 0, r"the header: it is no JSON: Expecting value at character 0"),
    "header cut": ({"a": A}, b"", 1000, r"truncated: its header should have 1000 bytes, \d+ are there"),
    "huge length": (
        {"a": A},
        bytes(16),
        2**64 - 1,
        rf"18446744073709551615 bytes, of which at most {MAX_HEADER_BYTES}",
    ),
    "length cuts the header": ({"a": A}, bytes(16), 20, "it is no JSON"),
    "length takes data": ({"a": A}, b"xx" + bytes(16), 56 + 8, "Extra data"),
    "data cut": ({"a": A}, bytes(13), None, r"truncated: it ends in 'a', 3 bytes before the end of its data"),
    "trailing": ({"a": A}, bytes(20), None, "trailing bytes: 4 bytes follow the last tensor"),
    "trailing alone": ({}, b"x", None, "trailing bytes: 1 bytes"),
    "overlap": (
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [3], 4, 16)},
        bytes(16),
        None,
        r"overlapping: 'b' has \[4, 16\) of the data, of which 'a' takes a part",
    ),
    "alias": ({"a": A, "b": A}, bytes(16), None, r"aliased: 'b' has the same bytes as 'a', \[0, 16\)"),
    "empty inside": ({"a": A, "z": entry("F32", [0], 8, 8)}, bytes(16), None, "overlapping: 'z'"),
    "hole": (
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 12, 16)},
        bytes(16),
        None,
        r"hole: nothing is in \[8, 12\) of the data, before 'b'",
    ),
    "out of range": (
        {"a": A, "b": entry("U8", [4], 2**62, 2**62 + 4)},
        bytes(16),
        None,
        r"out of range: 'b' has \[4611686018427387904, 4611686018427387908\) of the data, which has 16 bytes",
    ),
    "backwards": ({"a": entry("F32", [4], 16, 0)}, bytes(16), None, "'a' ends before it starts"),
    "wrong size": (
        {"a": entry("F32", [5], 0, 16)},
        bytes(16),
        None,
        r"wrong size: 'a' is \[5\] float32, 20 bytes, but",
    ),
    "overflow": ({"a": entry("F32", [2**62, 2, 2], 0, 16)}, bytes(16), None, "larger than any tensor"),
    "overflow to zero": ({"a": entry("F32", [2**62, 2**62, 0], 0, 0)}, b"", None, "larger than any tensor"),
    "unknown dtype": (
        {"a": entry("Q4", [4], 0, 16)},
        bytes(16),
        None,
        "unknown dtype: 'a' has the dtype 'Q4', which is",
    ),
    "dtype in small letters": ({"a": entry("f32", [4], 0, 16)}, bytes(16), None, "the dtype 'f32'"),
    "dtype no string": ({"a": entry(["F32"], [4], 0, 16)}, bytes(16), None, r"the dtype \['F32'\]"),
    "packed six bits": ({"a": entry("F6_E2M3", [4], 0, 16)}, bytes(16), None, "'F6_E2M3', which torch cannot hold"),
    "float in shape": ({"a": entry("F32", [4.0], 0, 16)}, bytes(16), None, r"shape .*: \[4.0\]"),
    "bool in shape": ({"a": entry("U8", [True], 0, 1)}, b"x", None, r"shape .*: \[True\]"),
    "negative shape": ({"a": entry("F32", [-2, -2], 0, 16)}, bytes(16), None, r"shape .*: \[-2, -2\]"),
    "minus zero": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}',
        b"x",
        None,
        r"data_offsets .*: \[-0.0, 1\]",
    ),
    "huge number": ({"a": entry("F32", [10**30], 0, 16)}, bytes(16), None, r"shape .*: \[10{30}\]"),
    "5000 digits": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
        b"x",
        None,
        r"\[inf\]",
    ),
    "three offsets": ({"a": {**A, "data_offsets": [0, 8, 16]}}, bytes(16), None, "not two whole numbers"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [4]}}, bytes(16), None, "'a' needs dtype, shape and data_offsets"),
    "field twice": (
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
        r"once each, and nothing else, got \('dtype',\)",
    ),
    "tensor is a number": ({"a": 3}, bytes(16), None, "'a' needs dtype, shape and data_offsets, .* got 'int'"),
    "metadata with a number": ({"a": A, "__metadata__": {"a": 1}}, bytes(16), None, "__metadata__ is no object of str"),
    "metadata a list": ({"a": A, "__metadata__": []}, bytes(16), None, "__metadata__ is no object of strings"),
    "metadata twice": (
        b'{"__metadata__":{},"__metadata__":{}}',
        b"",
        None,
        "duplicate: .*'__metadata__' more than once",
    ),
    "list": ([], b"", None, "the header is a list"),
    "null": (b"null", b"", None, "the header is a NoneType"),
    "not UTF-8": (b'{"\xff":{}}', b"", None, "it is not UTF-8: invalid start byte at byte 2"),
    "UTF-16": (json.dumps({"a": A}).encode("utf-16"), bytes(16), None, "it is not UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf{}", b"", None, "no JSON"),
    "half a character": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", None, "is no text"),
    "half a character in metadata": (b'{"__metadata__":{"a":"\\udfff"}}', b"", None, "no object of strings"),
    "NaN": (b'{"a":NaN}', b"", None, "it is no JSON: NaN"),
    "deep": (b"[" * 1_000_000, b"", None, "nested too deep"),
    "deep in a field": (b'{"a":{"x":' + b"[" * 200 + b"]" * 200 + b"}}", b"", None, "and nothing else, got"),
    "NUL after it": (b"{}\0", b"", None, "it is no JSON: Extra data"),
}
STRICTER = {  # the library opens these
    "name twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
        "duplicate: the header has 'a' more than once",
    ),
    "metadata key twice": (b'{"__metadata__":{"x":"1","x":"2"}}', b"", None, "__metadata__ has 'x' more than once"),
    "unknown field": ({"a": {**A, "scale": 2}}, bytes(16), None, "nothing else, got .*'scale'"),
    "list of fields": ({"a": ["F32", [4], [0, 16]]}, bytes(16), None, "'a' needs dtype.* got 'list'"),
    "packed four bits": ({"a": entry("F4", [32], 0, 16)}, bytes(16), None, "'F4', which torch cannot hold"),
    "more than torch counts": ({"a": entry("F32", [0, 2**63 - 1], 0, 0)}, b"", None, "larger than any tensor"),
}


@pytest.mark.parametrize("case", [*REFUSED, *STRICTER])
def test_each_fault_is_one_clear_error(tmp_path, case):
    header, data, length, message = {**REFUSED, **STRICTER}[case]
    path = write(tmp_path / "w.safetensors", header, data, length)
    assert (reference(path) is None) == (case in REFUSED)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{str(path)!r} is not a whole safetensors file:\n  ")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("nbytes", range(8))
def test_files_without_a_length_are_truncated(tmp_path, nbytes):
    (tmp_path / "w").write_bytes(bytes(nbytes))
    assert reference(tmp_path / "w") is None
    with pytest.raises(ValueError, match=f"truncated: it has {nbytes} bytes, too few"):
        read_header(tmp_path / "w")


def test_all_faults_of_a_file_are_listed_and_what_is_sound_is_told(tmp_path):
    write(tmp_path / "w", {"a": A, "q": entry("Q4", [1], 0, 16), "b": A, "n": entry("U8", [-1], 0, 1)})
    found = inspect_header(tmp_path / "w")
    assert list(found.header.entries) == ["a", "b"]
    assert not found.complete
    assert [problem.kind.value for problem in found.problems] == ["unknown dtype", "malformed", "aliased"]
    with pytest.raises(ValueError, match=r"(?s)'q'.*'n'.*'b'"):
        read_header(tmp_path / "w")


def test_ten_thousand_faults_make_a_short_message(tmp_path):
    write(tmp_path / "w", {f"t{number}": 0 for number in range(10_000)})
    with pytest.raises(ValueError, match=r"\.\.\. and 9950 more$") as caught:
        read_header(tmp_path / "w")
    assert len(caught.value.problems) == 10_000
    assert len(str(caught.value)) < 10_000


def test_other_things_than_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="no regular file"):
            read_header(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_header(tmp_path / "nothing")


def test_lies_cost_no_memory(tmp_path):
    with (tmp_path / "w").open("wb") as file:  # sparse: as large as it says, beyond the limit
        file.write((2 * MAX_HEADER_BYTES).to_bytes(8, "little"))
        file.truncate(3 * MAX_HEADER_BYTES)
    write(tmp_path / "v", {"a": A}, length=MAX_HEADER_BYTES)
    tracemalloc.start()
    for name in ("w", "v"):
        with pytest.raises(ValueError, match="should have"):
            read_header(tmp_path / name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.text().filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=4)),
        max_size=5,
    ),
    st.dictionaries(st.text(), st.text(), max_size=3),
    st.randoms(),
)
def test_sound_files_are_read_as_written(tmp_path_factory, tensors, metadata, random):
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        spec = TensorSpec(shape, DTYPES[dtype])
        header[name] = entry(dtype, shape, end, end + spec.nbytes)
        end += spec.nbytes
    items = [("__metadata__", metadata), *header.items()]
    random.shuffle(items)
    path = write(tmp_path_factory.mktemp("h") / "w", dict(items), bytes(end))
    found = read_header(path)
    base = path.stat().st_size - end
    assert found.metadata == metadata
    assert found.entries == {
        name: Entry(
            TensorSpec(shape, DTYPES[dtype]),
            base + header[name]["data_offsets"][0],
            base + header[name]["data_offsets"][1],
        )
        for name, (dtype, shape) in tensors.items()
    }
    starts = [held.start for held in found.entries.values()]
    assert starts == sorted(starts)
