"""The writer, against the reference reader and writer of safetensors."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from d9d.ckpt._dtypes import DTYPES
from d9d.ckpt._files import TensorFileWriter
from d9d.ckpt._memory import memory_of
from d9d.ckpt._spec import TensorSpec


def write(path, tensors):
    with TensorFileWriter(path, {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}) as writer:
        return {name: writer.write(name, tensor) for name, tensor in reversed(tensors.items())}


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda s: s != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
    )
)
def test_the_reference_reads_what_is_written(tmp_path_factory, layout):
    tensors = {
        name: torch.randint(0, 2 if dtype == "BOOL" else 256, [*shape, DTYPES[dtype].itemsize], dtype=torch.uint8)
        for name, (dtype, shape) in layout.items()
    }
    tensors = {name: bits.view(DTYPES[layout[name][0]]).reshape(layout[name][1]) for name, bits in tensors.items()}
    path = tmp_path_factory.mktemp("file") / "w.safetensors"
    checksums = write(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(memory_of(found[name])) == bytes(memory_of(tensor))
        assert checksums[name] == zlib.crc32(bytes(memory_of(tensor)))


def test_files_are_those_of_the_reference(tmp_path):
    tensors = {"b": torch.ones(3).bfloat16(), "a": torch.ones(2, 2), "c": torch.tensor([True]), "z": torch.tensor(3)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_slices_and_transposes_are_written_as_they_read(tmp_path):
    tensor = torch.arange(12).reshape(3, 4).T[1:]
    write(tmp_path / "w", {"a": tensor})
    assert torch.equal(load_file(tmp_path / "w")["a"], tensor)


def test_wrong_tensors_and_gaps_are_refused(tmp_path):
    specs = {"a": TensorSpec([2], torch.float32), "b": TensorSpec([2], torch.float32)}
    with (
        pytest.raises(ValueError, match=r"'a' should be \[2\] float32, got \[3\] float32"),
        TensorFileWriter(tmp_path / "1", specs) as writer,
    ):
        writer.write("a", torch.zeros(3))
    with pytest.raises(ValueError, match=r"left without \['b'\]"), TensorFileWriter(tmp_path / "2", specs) as writer:
        writer.write("a", torch.zeros(2))
    with pytest.raises(ValueError, match="complex128, which safetensors files cannot hold"):
        TensorFileWriter(tmp_path / "3", {"a": TensorSpec([2], torch.complex128)})
    with pytest.raises(ValueError, match=r"'a\\ud800' has half of a character"):
        TensorFileWriter(tmp_path / "4", {"a\ud800": TensorSpec([2], torch.float32)})
    with pytest.raises(ValueError, match="cannot be called '__metadata__'"):
        TensorFileWriter(tmp_path / "4", {"__metadata__": TensorSpec([2], torch.float32)})


def test_lazy_conjugates_are_written_as_they_read(tmp_path):
    tensors = {
        "c": torch.randn(3, dtype=torch.complex64).conj(),
        "n": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    write(tmp_path / "w", tensors)
    found = load_file(tmp_path / "w")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
