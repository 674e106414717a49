"""Opening and reading Hugging Face checkpoints."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from d9d.ckpt import CheckpointError, JobCheckpoints, Region, TensorSpec, open_checkpoint


def write_sharded(directory, files, weight_map):
    for file, tensors in files.items():
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / file)
    if weight_map is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([True, False])


@pytest.mark.parametrize("entry", ["", "model.safetensors.index.json"])
def test_opens_a_directory_or_its_index(tmp_path, entry):
    write_sharded(
        tmp_path, {"1.safetensors": {"a": A}, "2.safetensors": {"b": B}}, {"a": "1.safetensors", "b": "2.safetensors"}
    )
    source = open_checkpoint(tmp_path / entry)
    assert dict(source) == {"a": TensorSpec([2, 3], torch.float32), "b": TensorSpec([2], torch.bool)}
    assert torch.equal(source.read(Region("a", [1, 0], [1, 2])), A[1:2, 0:2])


def test_opens_a_file_or_files_without_an_index(tmp_path):
    write_sharded(tmp_path, {"w10.safetensors": {"a10": A}, "w9.safetensors": {"a9": A, "z": torch.tensor(3)}}, None)
    assert list(open_checkpoint(tmp_path)) == ["a9", "a10", "z"]
    single = open_checkpoint(tmp_path / "w9.safetensors")
    assert list(single) == ["a9", "z"]
    assert single.read(Region("z", [], [])).item() == 3


def test_contradictions_are_listed_in_one_error(tmp_path):  # case 27
    write_sharded(
        tmp_path,
        {"1.safetensors": {"twice": A, "a": A}, "2.safetensors": {"twice": A, "unlisted": B, "elsewhere": B}},
        {
            "a": "1.safetensors",
            "twice": "1.safetensors",
            "gone": "2.safetensors",
            "c": "3.safetensors",
            "elsewhere": "1.safetensors",
        },
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert sorted(caught.value.problems) == [
        "'2.safetensors' holds 'elsewhere', which the index has in '1.safetensors'",
        "'2.safetensors' holds 'unlisted', which the index lacks",
        "'twice' is in several files: ['1.safetensors', '2.safetensors']",
        "the index has 'elsewhere' in '1.safetensors', which lacks it",
        "the index has 'gone' in '2.safetensors', which lacks it",
        "the index names '3.safetensors', which is absent",
    ]


def test_numbered_files_are_missed_without_an_index(tmp_path):
    write_sharded(tmp_path, {"model-00001-of-00003.safetensors": {"a": A}, "x-1-of-1.safetensors": {"b": B}}, None)
    with pytest.raises(
        CheckpointError, match=r"of 3 numbered files are absent: \['model-00002-of-00003.safetensors', "
    ):
        open_checkpoint(tmp_path)
    assert list(open_checkpoint(tmp_path / "model-00001-of-00003.safetensors")) == ["a"]


def test_index_may_not_leave_its_directory(tmp_path):
    write_sharded(tmp_path, {}, {"a": "../secret.safetensors"})
    with pytest.raises(ValueError, match=r"outside the directory is named: '\.\./secret"):
        open_checkpoint(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*nothing"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file"):
        open_checkpoint(tmp_path)
    save_file({"a": A}, tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(data[:-3])
    with pytest.raises(ValueError, match=r"w\.safetensors' is not a whole safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index"):
        open_checkpoint(tmp_path / "x.index.json")


@pytest.mark.parametrize("region", [([-1, 0], [1, 3]), ([1, 0], [2, 3]), ([0], [1]), ([0, 0], [1]), ([0, 0], [1, -1])])
def test_a_region_beyond_its_tensor_is_refused(tmp_path, region):
    save_file({"a": A, "z": A.clone()}, tmp_path / "w.safetensors")
    JobCheckpoints(tmp_path / "job").save(1, {"a": A, "z": A}, shared={}, per_rank={})
    for path in (tmp_path / "w.safetensors", tmp_path / "job" / "step-00000001"):
        with pytest.raises(ValueError, match=r"is not within 'a', which is \[2, 3\] float32"):
            open_checkpoint(path).read(Region("a", *region))


def test_what_is_no_path_is_named():
    with pytest.raises(TypeError, match="a path or a list of paths is needed, got None"):
        open_checkpoint(None)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_reads_any_region(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    dtype = data.draw(st.sampled_from([torch.bool, torch.bfloat16, torch.int64, torch.float8_e4m3fn]))
    tensor = torch.randint(0, 2, shape).to(dtype)
    path = tmp_path_factory.mktemp("region") / "w.safetensors"
    save_file({"pad": torch.tensor([True]), "a": tensor}, path)
    offset = [data.draw(st.integers(0, length)) for length in shape]
    region = Region("a", offset, [data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset)])
    found = open_checkpoint(path).read(region)
    assert found.dtype == dtype
    assert torch.equal(found.float(), tensor.float()[region.slices])
