"""The reader engine: the right bytes, no more of them than needed, to where they belong; one error when it fails."""

import errno
import json
import math
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from d9d.ckpt import (
    Cast,
    Chunk,
    Concatenate,
    Group,
    Identity,
    Parallel,
    Prefix,
    ReadError,
    Region,
    Rename,
    Reshape,
    Sequential,
    Slice,
    Source,
    Squeeze,
    Stack,
    TensorSpec,
    Tie,
    Transpose,
    Unsqueeze,
    Unstack,
    load,
    open_checkpoint,
)
from d9d.ckpt import _hands as hands
from d9d.ckpt import _stream as stream
from d9d.ckpt._fill import Target
from d9d.ckpt._load import fill_targets

DTYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.complex64]


@pytest.fixture
def counted(monkeypatch):
    """Bytes of all reads so far."""
    total = [0]
    lock = threading.Lock()
    original = os.preadv

    def preadv(descriptor, buffers, offset):
        count = original(descriptor, buffers, offset)
        with lock:
            total[0] += count
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return total


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, high, [*shape, dtype.itemsize], dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def bits(tensor):
    """What tells NaN from NaN."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def write_unaligned(path, tensors, pad):
    """A file as others write it: names in any order, the data at any offset."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(bits(tensor).tolist())
        dtype = {torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.int64: "I64",
                 torch.complex64: "C64", torch.uint8: "U8"}[tensor.dtype]  # fmt: skip
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def strided_like(data, tensor):
    """A tensor to be filled, of any strides: dims permuted, with space between elements."""
    order = data.draw(st.permutations(range(tensor.ndim)))
    steps = [data.draw(st.integers(1, 2)) for _ in order]
    wide = torch.zeros([tensor.shape[dim] * step for dim, step in zip(order, steps)], dtype=tensor.dtype)
    narrow = wide[tuple(slice(None, None, step) for step in steps)]
    return narrow.permute([order.index(dim) for dim in range(tensor.ndim)])


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_region_of_any_file_comes_to_any_memory(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors = {"pad": random_tensor([data.draw(st.integers(0, 3))], torch.uint8), "a": random_tensor(shape, dtype, 1)}
    path = tmp_path_factory.mktemp("any") / "w.safetensors"
    write_unaligned(path, tensors, data.draw(st.integers(0, 9)))
    offset = [data.draw(st.integers(0, length)) for length in shape]
    region = Region("a", offset, [data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset)])
    expected = load_file(path)["a"][region.slices]
    source = open_checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:  # pieces and runs of all kinds from small tensors
        patch.setattr(hands, "PIECE", data.draw(st.sampled_from([16, 40, 4 << 20])))
        patch.setattr(stream, "PIECE", hands.PIECE)
        patch.setattr(hands, "_SHORT_RUN", data.draw(st.sampled_from([0, 8, 2048])))
        patch.setattr(hands, "_MAX_BUFFERS", data.draw(st.sampled_from([3, 1024])))
        patch.setattr(hands, "_SERIAL", data.draw(st.sampled_from([1, 7, 32767])))
        into = strided_like(data, expected)
        group = Group(["a"], ["a"], Identity())
        fill_targets(source, [(group, Target(region, dtype, into))], memory_budget=0, progress=None)
        assert torch.equal(bits(into), bits(expected))
        assert torch.equal(bits(source.read(region)), bits(expected))


SHAPE = (6, 4, 8)
N = math.prod(SHAPE)
A, B = "{i}.a", "{i}.b"
LAYOUTS = {
    "identity": Identity(),
    "rename": Rename("{i}.a", "x.{i}"),
    "under a prefix": Prefix("0.", Rename("a", "c"), output="z."),
    **{f"transpose {dims}": Transpose("0.a", "x", dims=dims) for dims in ((0, 1), (1, 2), (0, 2))},
    **{f"squeeze on {dim}": Sequential(Unsqueeze("0.a", "y", dim=dim), Squeeze("y", "x", dim=dim)) for dim in range(4)},
    **{f"unsqueeze on {dim}": Unsqueeze("0.a", "x", dim=dim) for dim in range(4)},
    **{f"slice on {dim}": Slice("0.a", "x", dim=dim, start=1, stop=3) for dim in range(3)},
    "tie": Tie("0.a", ["x", "y"]),
    "reshape in dims": Reshape("0.a", "x", input_shape=SHAPE, output_shape=(2, 3, 4, 2, 4)),
    "reshape over dims": Reshape("0.a", "x", input_shape=SHAPE, output_shape=(24, 8)),
    "cast": Cast("0.a", "x", dtype=torch.float32),
    "casts": Sequential(Cast("0.a", "y", dtype=torch.float8_e4m3fn), Cast("y", "x", dtype=torch.float32)),
    "cast, transposed and stacked": Sequential(
        Cast("{i}.a", "{i}.c", dtype=torch.float32), Transpose("{i}.c", "{i}.t", dims=(0, 2)),
        Stack("{i}.t", "x", count=3, dim=1),
    ),
    "one input twice": Sequential(
        Tie("0.a", ["y", "z"]), Concatenate(["y", "z"], "x", sizes=(SHAPE[1], SHAPE[1]), dim=1),
    ),
    **{f"stack on {dim}": Stack("{i}.a", "x", count=3, dim=dim) for dim in range(4)},
    **{f"concatenate on {dim}": Concatenate([A, B], "{i}.x", sizes=[SHAPE[dim]] * 2, dim=dim) for dim in range(3)},
    **{f"unstack on {dim}": Unstack("0.a", "x.{j}", count=SHAPE[dim], dim=dim) for dim in range(3)},
    **{f"chunk on {dim}": Chunk("0.a", ["x", "y"], sizes=[1, SHAPE[dim] - 1], dim=dim) for dim in range(3)},
    "chain": Sequential(
        Transpose("{i}.b", "{i}.bt", dims=(1, 2)), Transpose("{i}.bt", "{i}.c", dims=(1, 2)),
        Concatenate([A, "{i}.c"], "{i}.x", sizes=(4, 4), dim=1), Stack("{i}.x", "y", count=3, dim=2),
        Chunk("y", ["p", "q"], sizes=(2, 4)), Unstack("q", "q.{k}", count=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slice_on_any_dim_reads_what_it_needs_and_no_more(tmp_path, counted, layout):
    tensors = {f"{i}.{w}": random_tensor(SHAPE, torch.bfloat16, 2 * i + (w == "b")) for i in range(3) for w in "ab"}
    for i in range(3):
        part = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{i}.")}
        save_file(part, tmp_path / f"{i}.safetensors")
    source, mapper = open_checkpoint(tmp_path), LAYOUTS[layout]
    for group in mapper.bind(source):
        whole = group.mapper.apply({name: tensors[name] for name in group.inputs})  # the leaves' own arithmetic
        for name, tensor in whole.items():
            regions = [Region.whole(name, TensorSpec.of(tensor))]
            for dim, length in enumerate(tensor.shape):
                half = length // 2
                regions += [regions[0].replaced(dim, 0, half), regions[0].replaced(dim, half, length - half)]
            for region in filter(lambda region: region.numel, regions):
                counted[0] = 0
                into = torch.zeros(region.shape, dtype=tensor.dtype)
                target = Target(region, tensor.dtype, into)
                fill_targets(source, [(group, target)], memory_budget=0, progress=None)
                assert torch.equal(bits(into), bits(tensor[region.slices])), region
                needed = sum(need.numel * source[need.name].dtype.itemsize for need in group.needs(region, source))
                if layout != "one input twice":
                    assert needed == region.numel * torch.bfloat16.itemsize
                assert needed <= counted[0] <= 1.02 * needed, region


def test_short_gaps_are_read_over_within_two_percent(tmp_path, counted):
    tensor = random_tensor((40, 1010), torch.int64)
    save_file({"a": tensor}, tmp_path / "w.safetensors")
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        original = os.preadv
        patch.setattr(os, "preadv", lambda *args: calls.append(1) or original(*args))
        found = open_checkpoint(tmp_path).read(Region("a", [0, 5], [40, 1000]))
    assert torch.equal(found, tensor[:, 5:1005])
    assert found.nbytes < counted[0] <= 1.02 * found.nbytes
    assert len(calls) == 1


def test_reads_that_stop_short_go_on(tmp_path, monkeypatch):
    tensor = random_tensor((33, 7), torch.bfloat16)
    save_file({"a": tensor}, tmp_path / "w.safetensors")
    original = os.preadv

    def few(descriptor, buffers, offset):
        return original(descriptor, [buffers[0][: min(len(buffers[0]), 5)]], offset)

    monkeypatch.setattr(os, "preadv", few)
    into = torch.zeros(33, 14, dtype=torch.bfloat16)[:, :7]
    monkeypatch.setattr(hands, "_SHORT_RUN", 0)  # several buffers in a read
    load(open_checkpoint(tmp_path), Identity(), {"a": into})
    assert torch.equal(bits(into), bits(tensor))


def cut_in_b(path, patch):
    os.truncate(path, path.stat().st_size - 10)


def cut_while_open(path, patch):
    """After its size has been looked at."""
    whole = path.stat()
    patch.setattr(os, "fstat", lambda descriptor: whole)
    os.truncate(path, whole.st_size - 10)


def broken_disk(path, patch):
    original = os.preadv

    def preadv(descriptor, buffers, offset):
        if offset >= path.stat().st_size - 400:
            raise OSError(errno.EIO, "Input/output error")
        return original(descriptor, buffers, offset)

    patch.setattr(os, "preadv", preadv)


def removed(path, patch):
    path.unlink()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (cut_in_b, r"cannot read '[ab]' at byte \d+ of '.*w.safetensors': the file has \d+ bytes, when it was opened"),
        (cut_while_open, r"cannot read 'b' at byte \d+ of '.*w.safetensors': the file ends here, 10 bytes too early"),
        (broken_disk, r"cannot read 'b' at byte \d+ of '.*w.safetensors': Input/output error"),
        (removed, r"cannot read '[ab]' at byte \d+ of '.*w.safetensors': No such file"),
    ],
)
def test_a_failed_read_is_one_error_and_leaves_no_thread(tmp_path, monkeypatch, fault, message):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(50), "b": torch.zeros(100)}, path)
    source = open_checkpoint(path)
    before = threading.active_count()
    fault(path, monkeypatch)
    with pytest.raises(ReadError, match=message):
        load(source, Identity(), {"a": torch.zeros(50), "b": torch.zeros(100)})
    assert threading.active_count() == before


def test_an_error_of_the_caller_ends_all_reads(tmp_path):
    save_file({f"w{i}": torch.zeros(5) for i in range(100)}, tmp_path / "w.safetensors")
    before = threading.active_count()

    def stop(done, total):
        if done > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(open_checkpoint(tmp_path), Identity(), {f"w{i}": torch.zeros(5) for i in range(100)}, progress=stop)
    assert threading.active_count() == before


def test_progress_goes_from_nothing_to_all(tmp_path):
    save_file({f"w{i}": torch.zeros(5 * i) for i in range(10)}, tmp_path / "w.safetensors")
    told = []
    load(
        open_checkpoint(tmp_path),
        Identity(),
        {f"w{i}": torch.ones(5 * i) for i in range(10)},
        progress=lambda *args: told.append((threading.current_thread(), *args)),
    )
    assert {(thread, total) for thread, _, total in told} == {(threading.current_thread(), 900)}
    done = [done for _, done, _ in told]
    assert (done[0], done[-1]) == (0, 900)
    assert done == sorted(done)


def test_progress_of_sources_without_files_and_of_nothing():
    class Held(Source):
        def __getitem__(self, name):
            return {"a": TensorSpec([3], torch.float32)}[name]

        def __iter__(self):
            return iter(["a"])

        def __len__(self):
            return 1

        def read(self, region):
            return torch.ones(3)[region.slices]

    told = []
    load(Held(), Identity(), {"a": torch.zeros(3)}, progress=lambda *args: told.append(args))
    assert told == [(0, 12), (12, 12)]
    assert Held().file("a") == "Held"


def test_several_directories_are_one_checkpoint(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        save_file({f"w{number}": torch.full((2,), float(number))}, tmp_path / str(number) / "model.safetensors")
    source = open_checkpoint([tmp_path / "1", tmp_path / "2" / "model.safetensors"])
    assert list(source) == ["w1", "w2"]
    assert source.read(Region("w2", [0], [2])).tolist() == [2, 2]
    assert [source.file(name) for name in source] == [str(tmp_path / n / "model.safetensors") for n in "12"]
    with pytest.raises(ValueError, match=r"'w1' is in several files: \['.*1/model.safetensors', '.*1/model"):
        open_checkpoint([tmp_path / "1", tmp_path / "1"])
    with pytest.raises(ValueError, match="of no paths"):
        open_checkpoint([])


def test_one_memory_under_several_names_gets_the_last(tmp_path, counted):
    save_file(
        {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0), "c": torch.full((2,), 3.0)}, tmp_path / "w.safetensors"
    )
    for _ in range(10):
        tied = torch.zeros(4)
        counted[0] = 0
        load(open_checkpoint(tmp_path), Identity(), {"a": tied, "b": tied, "c": tied[1:3]})
        assert tied.tolist() == [2, 3, 3, 2]
        assert counted[0] == 24, "what is overwritten is not read"


def test_expanded_and_meta_tensors_are_refused(tmp_path):
    save_file({"a": torch.ones(4, 4)}, tmp_path / "w.safetensors")
    source = open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"`contiguous` first: \['a'\]"):
        load(source, Identity(), {"a": torch.zeros(4, 1).expand(4, 4)})
    with pytest.raises(ValueError, match=r"to_empty` first: \['a'\]"):
        load(source, Identity(), {"a": torch.empty(4, 4, device="meta")})


def test_lazy_conjugates_and_inference_tensors_are_filled(tmp_path):
    tensor = torch.randn(4, dtype=torch.complex64)
    save_file({"a": tensor}, tmp_path / "w.safetensors")
    conjugate = torch.zeros(4, dtype=torch.complex64).conj()
    load(open_checkpoint(tmp_path), Identity(), {"a": conjugate})
    assert torch.equal(conjugate, tensor)
    with torch.inference_mode():
        frozen = torch.zeros(4, 2, dtype=torch.complex64)[:, 0]
    load(open_checkpoint(tmp_path), Identity(), {"a": frozen})
    assert torch.equal(frozen, tensor)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 12))
def test_what_is_in_flight_stays_within_the_budget(tmp_path_factory, sizes, budget):
    path = tmp_path_factory.mktemp("budget") / "w.safetensors"
    save_file({f"w{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}, path)
    source = open_checkpoint(path)
    flying, ended = {}, []

    def batch(number, size):
        region = Region(f"w{number}", [0], [size])

        def start():
            flying[number] = size
            assert sum(flying.values()) <= budget or len(flying) == 1
            for extent in source.extents(region):
                yield stream.Fill(extent, torch.zeros(size, dtype=torch.uint8))

        return stream.Batch(size, size, start, lambda: ended.append(flying.pop(number)))

    stream.run_batches([batch(*each) for each in enumerate(sizes)], memory_budget=budget)
    assert sorted(ended) == sorted(sizes)


def test_parallel_groups_of_layers_and_a_negative_budget(tmp_path):
    save_file({"0.a": torch.ones(2), "0.b": torch.ones(3)}, tmp_path / "w.safetensors")
    mapper = Parallel(Rename("{i}.a", "a.{i}"), Rename("{i}.b", "b.{i}"))
    state = {"a.0": torch.zeros(2), "b.0": torch.zeros(3)}
    with pytest.raises(ValueError, match="memory_budget must not be negative, got -1"):
        load(open_checkpoint(tmp_path), mapper, state, memory_budget=-1)
    load(open_checkpoint(tmp_path), mapper, state, memory_budget=0)
    assert state["b.0"].tolist() == [1, 1, 1]
