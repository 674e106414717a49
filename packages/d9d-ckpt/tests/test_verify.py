"""Each fault that is planted in a checkpoint is found under its name, and none in sound ones."""

import json
import shutil
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from d9d.ckpt import JobCheckpoints, ProblemKind, verify
from d9d.ckpt._dtypes import DTYPES
from d9d.ckpt._findings import Problem

INDEX = "model.safetensors.index.json"
FILES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def kinds(report):
    return Counter(problem.kind for problem in report.problems)


@pytest.fixture
def sharded(tmp_path):
    """Three files of two tensors each, and their index."""
    weight_map = {}
    for number, file in enumerate(FILES):
        tensors = {
            f"layers.{number}.a": torch.full((2, 3), number + 1.0),
            f"layers.{number}.b": torch.arange(5) + number,
        }
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 3 * (24 + 40)}, "weight_map": weight_map}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def edit_header(path, change, data=None):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + (content[8 + length :] if data is None else data))


def edit_index(directory, change):
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def append(path, data):
    path.write_bytes(path.read_bytes() + data)


def cut(path, nbytes):
    path.write_bytes(path.read_bytes()[:-nbytes])


K = ProblemKind
PLANTED = {
    "cut": (lambda d: cut(d / FILES[1], 3), K.TRUNCATED, "'model-00002-of-00003.safetensors': it ends in 'layers.1"),
    "no bytes": (lambda d: (d / FILES[1]).write_bytes(b""), K.TRUNCATED, "it has 0 bytes"),
    "longer": (lambda d: append(d / FILES[2], b"xyz"), K.TRAILING, "3 bytes follow"),
    "overlap": (
        lambda d: edit_header(
            d / FILES[0], lambda h: h.update({"layers.0.a": entry("F32", [2, 3], 36, 60)}), bytes(60)
        ),
        K.OVERLAPPING,
        "'layers.0.a' has [36, 60) of the data, of which 'layers.0.b'",
    ),
    "alias": (
        lambda d: edit_header(
            d / FILES[0],
            lambda h: {"layers.0.a": entry("U8", [40], 0, 40), "layers.0.b": entry("I64", [5], 0, 40)},
            bytes(40),
        ),
        K.ALIASED,
        "'layers.0.b' has the same bytes as 'layers.0.a'",
    ),
    "hole": (
        lambda d: edit_header(
            d / FILES[0], lambda h: h.update({"layers.0.a": entry("F32", [2, 3], 44, 68)}), bytes(68)
        ),
        K.HOLE,
        "nothing is in [40, 44)",
    ),
    "beyond": (
        lambda d: edit_header(d / FILES[0], lambda h: h.update({"layers.0.a": entry("F32", [2, 3], 4000, 4024)})),
        K.OUT_OF_RANGE,
        "'layers.0.a' has [4000, 4024) of the data, which has 64 bytes",
    ),
    "wrong size": (
        lambda d: edit_header(d / FILES[0], lambda h: h.update({"layers.0.a": entry("F32", [2, 2], 40, 64)})),
        K.WRONG_SIZE,
        "'layers.0.a' is [2, 2] float32, 16 bytes",
    ),
    "dtype": (
        lambda d: edit_header(d / FILES[0], lambda h: h["layers.0.a"].update(dtype="Q8")),
        K.UNKNOWN_DTYPE,
        "'layers.0.a' has the dtype 'Q8'",
    ),
    "header": (lambda d: edit_header(d / FILES[0], lambda h: [1]), K.MALFORMED, "the header is a list"),
    "twice": (
        lambda d: shutil.copy(d / FILES[0], d / FILES[1]),
        K.DUPLICATE,
        "'layers.0.a' is in several files: ['model-00001",
    ),
    "file gone": (lambda d: (d / FILES[1]).unlink(), K.MISSING_FILE, "the index names 'model-00002-of"),
    "file is a directory": (
        lambda d: ((d / FILES[1]).unlink(), (d / FILES[1]).mkdir()),
        K.MALFORMED,
        "it is no regular file",
    ),
    "tensor gone": (
        lambda d: save_file({"layers.1.a": torch.ones(2, 3)}, d / FILES[1]),
        K.MISSING_TENSOR,
        "the index has 'layers.1.b' in 'model-00002",
    ),
    "not listed": (
        lambda d: edit_index(d, lambda i: i["weight_map"].pop("layers.2.b")),
        K.UNLISTED_TENSOR,
        "'model-00003-of-00003.safetensors' holds 'layers.2.b', which the index lacks",
    ),
    "total size": (
        lambda d: edit_index(d, lambda i: i["metadata"].update(total_size=191)),
        K.TOTAL_SIZE,
        "the index says total_size 191, the tensors have 192 bytes",
    ),
    "leaves": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update({"layers.0.a": "../x"})),
        K.OUTSIDE,
        "a file outside the directory is named: '../x'",
    ),
    "no index": (lambda d: (d / INDEX).write_text("{}"), K.MALFORMED, "'model.safetensors.index.json': it needs a"),
    "two indexes": (lambda d: shutil.copy(d / INDEX, d / ("x" + INDEX)), K.SEVERAL_INDEXES, "open one of ["),
    "name twice in index": (
        lambda d: (d / INDEX).write_text((d / INDEX).read_text().replace('map": {', 'map": {"layers.0.a": "x", ')),
        K.DUPLICATE,
        "the index has 'layers.0.a' more than once",
    ),
    "name twice in a file": (
        lambda d: (d / FILES[0]).write_bytes((d / FILES[0]).read_bytes().replace(b"layers.0.b", b"layers.0.a")),
        K.DUPLICATE,
        "the header has 'layers.0.a' more than once",
    ),
    "number absent": (
        lambda d: ((d / INDEX).unlink(), (d / FILES[1]).unlink()),
        K.MISSING_FILE,
        "of 3 numbered files are absent: ['model-00002-of-00003.safetensors']",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found_by_name(sharded, fault):
    assert verify(sharded).sound
    plant, kind, text = PLANTED[fault]
    plant(sharded)
    report = verify(sharded)
    assert any(problem.kind is kind and text in str(problem) for problem in report.problems), str(report)
    # no other kind, but for what the fault brings with it
    brings = {"overlap": {K.TOTAL_SIZE}, "twice": {K.MISSING_TENSOR}, "tensor gone": {K.TOTAL_SIZE}}
    brings |= {"alias": {K.TOTAL_SIZE}}
    assert kinds(report).keys() - brings.get(fault, set()) == {kind}, str(report)


def test_all_faults_are_reported_at_once(sharded):
    for fault in ("cut", "longer", "dtype", "not listed", "leaves"):
        PLANTED[fault][0](sharded)
    found = kinds(verify(sharded))
    assert {K.TRUNCATED, K.TRAILING, K.UNKNOWN_DTYPE, K.UNLISTED_TENSOR, K.OUTSIDE} <= found.keys()


def test_notes_are_no_problems(sharded):
    save_file({"x": torch.ones(1)}, sharded / "old.safetensors")
    report = verify(sharded)
    assert report.sound
    assert report.notes == (
        Problem(K.UNLISTED_FILE, "the index does not name it, so it is not read", "old.safetensors"),
    )
    assert str(report).endswith(
        "in 3 file(s): sound\n  note: unlisted file: 'old.safetensors': the index does not name it, so it is not read"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_values_that_are_not_finite_are_counted(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("d9d.ckpt._blocks.BLOCK_BYTES", 16)
    values = torch.ones(100)
    values[[3, 50, 99]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    save_file({"a": values.to(dtype), "b": torch.ones(3), "c": torch.arange(3)}, tmp_path / "w.safetensors")
    assert verify(tmp_path).sound
    report = verify(tmp_path, values=True)
    assert [str(problem) for problem in report.problems] == [
        "not finite: 'w.safetensors': 'a' has 1 NaN and 2 infinite of 100 values"
    ]


def test_equal_contents_are_a_note(tmp_path):
    head = torch.randn(4, 3)
    save_file(
        {"embed": head, "lm_head": head.clone(), "other": torch.randn(4, 3), "flat": head.reshape(12).clone()},
        tmp_path / "w.safetensors",
    )
    report = verify(tmp_path / "w.safetensors", contents=True)
    assert report.sound
    assert [str(note) for note in report.notes] == ["equal: ['embed', 'lm_head'] hold the same [4, 3] float32"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("absent", [[], [0], [1, 3]])
def test_numbers_may_start_from_either(tmp_path, first, absent):
    for number in range(4):
        if number not in absent:
            save_file({f"t{number}": torch.ones(1)}, tmp_path / f"w-{number + first:02}-of-04.safetensors")
    report = verify(tmp_path)
    if first == 0 and absent == [0]:
        assert "['w-04-of-04.safetensors']" in str(report)  # not to be told from counting from 1
    else:
        assert report.sound == (not absent)
        assert all(f"w-{number + first:02}-of-04" in str(report) for number in absent)


def test_a_lie_of_a_billion_files_is_short(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "w-1-of-999999999.safetensors")
    (problem,) = verify(tmp_path).problems
    assert problem.text.endswith("'w-11-of-999999999.safetensors'] and 999999988 more")


def test_nothing_to_verify(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError):
            verify(path)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_none_are_found_in_sound_checkpoints(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("sound")
    names = data.draw(
        st.lists(st.text(), unique=True, min_size=1, max_size=8).filter(lambda n: "__metadata__" not in n)
    )
    shards = data.draw(st.integers(1, 3))
    files = [{} for _ in range(shards)]
    for name in names:
        dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
        tensor = torch.zeros(data.draw(st.lists(st.integers(0, 3), max_size=3)), dtype=dtype)
        files[data.draw(st.integers(0, shards - 1))][name] = tensor
    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    if data.draw(st.booleans()):
        total = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
        found = verify(directory / INDEX, values=True, contents=True)
        assert not found.problems, str(found)
    report = verify(directory, values=True)
    assert not report.problems, str(report)
    assert report.tensors == len(names)


@pytest.fixture
def job(tmp_path):
    tensors = {"w": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(3)}
    JobCheckpoints(tmp_path).save(
        10, tensors, shared={"seed": 2**127, "loss": float("nan")}, per_rank={"rng": torch.arange(4), "x": 1}
    )
    return tmp_path / "step-00000010"


RANK = "rank-00000.safetensors"


def edit_manifest(directory, change):
    manifest = json.loads((directory / "manifest.json").read_text())
    change(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def set_chunks(manifest, *regions):
    (chunk,) = manifest["tensors"]["w"]["chunks"]
    manifest["tensors"]["w"]["chunks"] = [{**chunk, "offset": offset, "shape": shape} for offset, shape in regions]


PLANTED_IN_JOBS = {
    "cut": (lambda d: cut(d / RANK, 1), {K.TRUNCATED}, "it ends in"),
    "flip": (lambda d: flip_last_byte(d / RANK), {K.CHECKSUM}, "'rank-00000.safetensors': 'shared/w' has the checksum"),
    "gone": (lambda d: (d / RANK).unlink(), {K.MISSING_FILE}, "the manifest names 'rank-00000.safetensors'"),
    "no manifest": (lambda d: (d / "manifest.json").write_text("{}"), {K.MALFORMED}, "the manifest is damaged"),
    "version": (lambda d: edit_manifest(d, lambda m: m.update(version=9)), {K.MALFORMED}, "'version': 9"),
    "bytes": (
        lambda d: edit_manifest(d, lambda m: m["ranks"][0].update(bytes=7)),
        {K.WRONG_SIZE},
        "the manifest says that it has 7 bytes",
    ),
    "leaves": (
        lambda d: edit_manifest(d, lambda m: m["ranks"][0].update(file="../x")),
        {K.MALFORMED},
        "outside the directory is named: '../x'",
    ),
    "key": (
        lambda d: edit_manifest(d, lambda m: m["tensors"]["w"]["chunks"][0].update(key="shared/v")),
        {K.MISSING_TENSOR, K.UNLISTED_TENSOR},
        "it lacks 'shared/v'",
    ),
    "dtype": (
        lambda d: edit_manifest(d, lambda m: m["tensors"]["w"].update(dtype="I32")),
        {K.WRONG_SIZE},
        "'shared/w' should be [3, 4] int32, is [3, 4] float32",
    ),
    "chunks left out": (
        lambda d: edit_manifest(d, lambda m: m["tensors"]["w"].update(chunks=[])),
        {K.HOLE, K.UNLISTED_TENSOR},
        "the chunks of 'w' are not all of [3, 4] float32: they have 0 of 12 elements",
    ),
    "chunk beyond": (
        lambda d: edit_manifest(d, lambda m: set_chunks(m, ([1, 0], [3, 4]))),
        {K.OUT_OF_RANGE},
        "some lie beyond",
    ),
    "chunks overlap": (
        lambda d: edit_manifest(d, lambda m: set_chunks(m, ([0, 0], [2, 4]), ([0, 0], [1, 4]))),
        {K.OVERLAPPING, K.WRONG_SIZE},
        "chunks of 'w' overlap",
    ),
    "wrong type": (
        lambda d: edit_manifest(d, lambda m: set_chunks(m, ([0, -1], [3, 4]))),
        {K.MALFORMED},
        "the manifest is damaged: a whole number from 0 on is needed, got -1",
    ),
}


@pytest.mark.parametrize("fault", PLANTED_IN_JOBS)
def test_faults_of_job_checkpoints_are_found_by_name(job, fault):
    for path in (job, job / "manifest.json"):
        report = verify(path, values=True, contents=True)
        assert (report.sound, report.tensors, report.notes) == (True, 2, ())
    plant, found, text = PLANTED_IN_JOBS[fault]
    plant(job)
    report = verify(job)
    assert kinds(report).keys() == found, str(report)
    assert text in str(report)


def test_state_in_a_manifest_comes_back_as_it_was(job):
    shared = JobCheckpoints(job.parent).latest().shared
    assert shared["seed"] == 2**127
    assert shared["loss"] != shared["loss"]
