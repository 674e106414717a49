"""From checkpoint to checkpoint in one process; shards and their owners; what lies beside the weights."""

import json
import os
import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from d9d.ckpt import (
    ChecksumError,
    Concatenate,
    Identity,
    JobCheckpoints,
    Parallel,
    PlanError,
    Prefix,
    Region,
    Rename,
    Sequential,
    Stack,
    TensorSpec,
    Tie,
    Unstack,
    convert,
    export,
    load,
    open_checkpoint,
)
from d9d.ckpt._shards import cut_shards

MAPPER = Parallel(
    Rename("norm", "final"),
    Identity("step", "none", "scale"),
    Sequential(
        Concatenate(["e.{e}.gate", "e.{e}.up"], "e.{e}.gate_up", sizes=(3, 3)),
        Stack("e.{e}.gate_up", "gate_up", count=12),
    ),
)


def tensors():
    generator = torch.Generator().manual_seed(0)
    experts = {
        f"e.{e}.{w}": torch.randn(3, 5, generator=generator).bfloat16() for e in range(12) for w in ("gate", "up")
    }
    return {
        **experts,
        "norm": torch.randn(5, generator=generator),
        "step": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "scale": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    }


def read_all(directory):
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_there_and_back_is_byte_identical(tmp_path):  # case 25
    save_file(tensors(), tmp_path / "w.safetensors")
    told = []
    convert(
        open_checkpoint(tmp_path), MAPPER, tmp_path / "stacked", max_shard_bytes=200, progress=lambda *n: told.append(n)
    )
    stacked = read_all(tmp_path / "stacked")
    expected = MAPPER.apply(tensors())
    assert stacked.keys() == expected.keys()
    assert all(torch.equal(stacked[name].float(), expected[name].float()) for name in expected)
    total = sum(tensor.nbytes for tensor in tensors().values())
    assert (told[0], told[-1]) == ((0, total), (total, total))
    index = json.loads((tmp_path / "stacked" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()

    for memory_budget in (0, 1 << 20):
        back = tmp_path / f"back{memory_budget}"
        convert(open_checkpoint(tmp_path / "stacked"), MAPPER.inverse(), back, memory_budget=memory_budget)
        export(tensors(), Identity(), tmp_path / f"exported{memory_budget}")
        assert contents(back) == contents(tmp_path / f"exported{memory_budget}")


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    save_file(tensors(), tmp_path / "w.safetensors")
    source = open_checkpoint(tmp_path)
    with pytest.raises(PlanError, match="neither used nor waived: 'e.0.gate'"):
        convert(source, Identity("norm", "step", "none", "scale"), tmp_path / "out")
    with pytest.raises(PlanError, match="in the target, but not made: 'more'"):
        convert(source, Identity(), tmp_path / "out", target={**source, "more": source["norm"]})
    with pytest.raises(FileNotFoundError):
        convert(source, Identity(), tmp_path / "out", copy_from=tmp_path / "absent")
    with pytest.raises(ValueError, match="max_shard_bytes must be a whole number of at least 1, got 0"):
        convert(source, Identity(), tmp_path / "out", max_shard_bytes=0)
    with pytest.raises(ValueError, match="max_shard_bytes must be a whole number of at least 1, got '5GB'"):
        convert(source, Identity(), tmp_path / "out", max_shard_bytes="5GB")
    with pytest.raises(TypeError, match=r"such as torch\.bfloat16, got 'bfloat16'"):
        convert(source, Identity(), tmp_path / "out", dtype="bfloat16")
    for mapper in (None, Identity):
        with pytest.raises(TypeError, match=r"a mapper is needed, such as Identity\(\), got"):
            convert(source, mapper, tmp_path / "out")
    for taken in (tmp_path, ".", "/"):
        with pytest.raises(FileExistsError, match="exists: remove it or choose another name"):
            convert(source, Identity(), taken)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    convert(source, Identity("norm"), tmp_path / "out", waive=["e.{e}.{w}", "step", "none", "scale"])
    assert read_all(tmp_path / "out").keys() == {"norm"}
    with pytest.raises(FileExistsError):
        convert(source, Identity(), tmp_path / "out")


def test_a_failure_on_the_way_leaves_nothing(tmp_path):
    save_file(tensors(), tmp_path / "w.safetensors")
    source = open_checkpoint(tmp_path)
    os.truncate(tmp_path / "w.safetensors", 2000)
    with pytest.raises(OSError, match="when it was opened"):
        convert(source, MAPPER, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_dtype_is_for_floating_tensors_that_are_not_quantized(tmp_path):
    save_file(tensors(), tmp_path / "w.safetensors")
    for name, write in {
        "converted": lambda path: convert(open_checkpoint(tmp_path), Identity(), path, dtype=torch.float16),
        "exported": lambda path: export(tensors(), Identity(), path, dtype=torch.float16),
    }.items():
        write(tmp_path / name)
        for key, tensor in read_all(tmp_path / name).items():
            before = tensors()[key]
            quantized = before.dtype == torch.float8_e4m3fn
            expected = before.half() if before.is_floating_point() and not quantized else before
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor.float(), expected.float())
    assert contents(tmp_path / "converted") == contents(tmp_path / "exported")


def test_a_tied_head_is_written_once_and_an_untied_one_is_kept(tmp_path):  # case 26
    state = {"embedding": torch.randn(4, 3), "head": torch.randn(4, 3)}
    tie = Tie("embed", ["embedding", "head"])
    tied = {"embedding": state["embedding"], "head": state["embedding"]}
    export(tied, tie.inverse(), tmp_path / "tied", max_shard_bytes=1)
    assert read_all(tmp_path / "tied").keys() == {"embed"}
    assert not (tmp_path / "tied" / "model.safetensors.index.json").exists()
    found = {"embedding": torch.zeros(4, 3), "head": torch.zeros(4, 3)}
    load(open_checkpoint(tmp_path / "tied"), tie, found)
    assert torch.equal(found["embedding"], state["embedding"])
    assert torch.equal(found["head"], state["embedding"])

    with pytest.raises(ValueError, match="head"):
        export(state, tie.inverse(), tmp_path / "lost")
    assert not (tmp_path / "lost").exists()
    export(state, Identity(), tmp_path / "untied", max_shard_bytes=1)
    index = json.loads((tmp_path / "untied" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {"embedding", "head"}
    load(open_checkpoint(tmp_path / "untied"), Identity(), found)
    assert torch.equal(found["head"], state["head"])


def test_what_belongs_to_a_model_is_copied_beside_it(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    beside = {"config.json": "{}", "tokenizer.model": "\0", "merges.txt": "a b", "chat_template.jinja": "",
              "LICENSE": "x", "modeling.py": ""}  # fmt: skip
    others = {"model.safetensors.index.json.bak": "", "pytorch_model.bin.index.json": "{}", "pytorch_model.bin": "",
              ".hidden.json": "", "README.md": ""}  # fmt: skip
    for name, text in {**beside, **others}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "original.json").mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    convert(open_checkpoint(tmp_path / "model.safetensors"), Identity(), tmp_path / "out", copy_from=tmp_path)
    found = contents(tmp_path / "out")
    assert found.pop("model.safetensors")
    assert found == {name: text.encode() for name, text in beside.items()}


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "model.safetensors.index.json"])
def test_extra_files_are_names_of_their_own(tmp_path, name):
    with pytest.raises(ValueError, match="a name of its own without directories"):
        export({"a": torch.ones(2)}, Identity(), tmp_path / "out", extra_files={name: ""})
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileExistsError):
        export({"a": torch.ones(2)}, Identity(), tmp_path / "out", extra_files={"model.safetensors": ""})
    assert not list(tmp_path.iterdir())


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12), st.integers(1, 5), st.randoms())
def test_files_are_cut_by_size_and_shared_out_evenly(sizes, max_bytes, ranks, rng):
    specs = {f"w{i}": TensorSpec([size], torch.uint8) for i, size in enumerate(sizes)}
    held = {name: {rng.randrange(ranks): spec.nbytes} for name, spec in specs.items()}
    shards = cut_shards(specs, max_bytes=max_bytes, ranks=ranks, held=held.__getitem__)
    assert [name for shard in shards for name in shard.specs] == list(specs)
    assert all(shard.nbytes <= max_bytes or len(shard.specs) == 1 for shard in shards)
    owned = [sum(shard.owner == rank for shard in shards) for rank in range(ranks)]
    assert max(owned) <= -(-len(shards) // ranks)
    assert len(shards) == 1 or all(
        before.nbytes + next(iter(after.specs.values())).nbytes > max_bytes for before, after in pairwise(shards)
    )


def test_a_file_goes_to_who_has_most_of_it():
    specs = {f"w{i}": TensorSpec([4], torch.uint8) for i in range(4)}
    held = {"w0": {1: 4}, "w1": {0: 4}, "w2": {0: 4, 1: 1}, "w3": {1: 3, 0: 1}}
    shards = cut_shards(specs, max_bytes=4, ranks=2, held=held.__getitem__)
    assert [shard.owner for shard in shards] == [1, 0, 0, 1]


def test_a_job_checkpoint_becomes_a_model_without_a_trainer(tmp_path):
    model = {f"model.{name}": tensor for name, tensor in MAPPER.apply(tensors()).items() if tensor.dtype.itemsize > 1}
    moments = {
        f"optimizer.{name.removeprefix('model.')}.{key}": torch.full(tensor.shape, 0.5)
        for name, tensor in model.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    JobCheckpoints(tmp_path / "job").save(3, {**model, **moments}, shared={}, per_rank={})
    source = JobCheckpoints(tmp_path / "job").latest().source
    undo = Prefix(
        "model.", Parallel(*MAPPER.mappers[:1], Identity("step", "none"), MAPPER.mappers[2]).inverse(), output=""
    )
    convert(source, undo, tmp_path / "out", waive=["optimizer.*"])
    found = read_all(tmp_path / "out")
    expected = {name: tensor for name, tensor in tensors().items() if name != "scale"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert source.file("model.final") == "rank-00000.safetensors"

    [path] = (tmp_path / "job").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    damaged = JobCheckpoints(tmp_path / "job").latest().source
    with pytest.raises(ChecksumError, match="is damaged: its data in"):
        convert(damaged, undo, tmp_path / "again", waive=["optimizer.*"])
    assert not (tmp_path / "again").exists()


def test_more_files_than_a_process_may_have_open(tmp_path):
    count = 200
    save_file({"a": torch.randn(count, 4), "b": torch.randn(count, 4)}, tmp_path / "w.safetensors")
    source = open_checkpoint(tmp_path)
    mapper = Parallel(*(Unstack(name, f"{{i}}.{name}", count=count) for name in "ab"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, hard))
    try:
        convert(source, mapper, tmp_path / "converted", max_shard_bytes=32)
        state = {name: source.read(Region.whole(name, source[name])) for name in source}
        export(state, mapper, tmp_path / "exported", max_shard_bytes=32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files() == before
    assert contents(tmp_path / "converted") == contents(tmp_path / "exported")
    found = read_all(tmp_path / "exported")
    assert len(contents(tmp_path / "exported")) == count + 1
    for name in "ab":
        assert torch.equal(torch.stack([found[f"{i}.{name}"] for i in range(count)]), state[name])


def test_a_full_disk_names_the_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*model.safetensors'"):
            export({"a": torch.ones(10_000)}, Identity(), tmp_path / "out")
        with pytest.raises(OSError, match=r"File too large: .*config.json'"):
            export({"a": torch.ones(10)}, Identity(), tmp_path / "out", extra_files={"config.json": "x" * 20_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    assert open_files() == before


def test_weights_become_floating_tensors_only(tmp_path):
    save_file({"a": torch.randn(3)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="got torch.int32"):
        convert(open_checkpoint(tmp_path), Identity(), tmp_path / "out", dtype=torch.int32)
    with pytest.raises(ValueError, match="got torch.bool"):
        export({"a": torch.randn(3)}, Identity(), tmp_path / "out", dtype=torch.bool)
    assert not (tmp_path / "out").exists()


def test_a_link_to_nowhere_is_a_name_that_is_taken(tmp_path):
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="out' exists"):
        export({"a": torch.ones(3)}, Identity(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
