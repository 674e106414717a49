"""Mutated checkpoints open and read as `safetensors` does, or fail with one clear error, and never look elsewhere."""

import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from d9d.ckpt import JobCheckpoint, JobCheckpoints, Region, UnknownFormatError, open_checkpoint, verify

INDEX = "model.safetensors.index.json"
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
ALLOWED = (ValueError, OSError)  # ReadError and CheckpointError are of these

listeners: list[list[str]] = []


def listen(event, arguments):
    if listeners and event == "open" and isinstance(arguments[0], (str, bytes)):
        listeners[-1].append(os.fsdecode(arguments[0]))


sys.addaudithook(listen)  # stays until the process ends, and costs a comparison


@contextlib.contextmanager
def paths_opened():
    """The paths that Python opens in the block."""
    listeners.append([])
    try:
        yield listeners[-1]
    finally:
        listeners.pop()


@pytest.fixture
def directory(tmp_path):
    """In memory where that is possible: creating files is most of the work. Beside it lie files as bait."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as name:
        inside = Path(name, "inside")
        for bait in ("x", "inside/a/b"):
            Path(name, bait).parent.mkdir(parents=True, exist_ok=True)
            save_file({"embed.weight": torch.ones(50, 8), "bait": torch.ones(1)}, Path(name, bait))
        yield inside


def make(directory):
    torch.manual_seed(0)
    tensors = {
        FILES[0]: {
            "embed.weight": torch.randn(50, 8),
            "layers.0.w": torch.arange(7),
            "flag": torch.tensor([True, False]),
        },
        FILES[1]: {"layers.1.w": torch.randn(3, 2).bfloat16(), "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)},
    }
    for file, some in tensors.items():
        save_file(some, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, some in tensors.items() for name in some}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 300}, "weight_map": weight_map}, indent=2))
    return {file: (directory / file).read_bytes() for file in (*FILES, INDEX)}


NUMBERS = [0, 1, -1, 2, 8, 80, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40, 1.5, -0.0, 1e400, True, None, "1"]
NAMES = [
    "",
    "flag",
    "embed.weight",
    "../x",
    "/etc/passwd",
    "..",
    "a/b",
    "\0",
    "\ud800",
    "é",
    "__metadata__",
    FILES[0],
    INDEX,
]
DTYPES = ["F32", "I64", "BOOL", "F4", "F6_E2M3", "Q8", "f32", "C64", "F8_E4M3", ""]


def bend(rng, value, depth=0):
    """A JSON value with one thing changed somewhere."""
    choice = rng.random()
    if isinstance(value, dict) and value and (depth == 0 or choice < 0.7):
        value = dict(value)
        key = rng.choice(list(value))
        action = rng.randrange(6)
        if action == 0:
            del value[key]
        elif action == 1:
            value[rng.choice(NAMES + list(value))] = value[key]
        elif action == 2:
            value = {rng.choice(NAMES) if other == key else other: item for other, item in value.items()}
        else:
            value[key] = bend(rng, value[key], depth + 1)
        return value
    if isinstance(value, list) and value and choice < 0.8:
        value = list(value)
        place = rng.randrange(len(value))
        action = rng.randrange(5)
        if action == 0:
            del value[place]
        elif action == 1:
            value.insert(place, rng.choice(NUMBERS))
        else:
            value[place] = bend(rng, value[place], depth + 1)
        return value
    if isinstance(value, int) and choice < 0.5:
        return value + rng.choice([-8, -1, 1, 4, 8])
    if isinstance(value, str) and choice < 0.7:
        return rng.choice(DTYPES + NAMES)
    return rng.choice([*NUMBERS, *NAMES, [], {}, [[]], {"a": [0]}])


def mutate_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        place = rng.randrange(len(data) + 1)
        action = rng.randrange(6)
        if action == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif action == 1 and data:
            data[min(place, len(data) - 1)] = rng.randrange(256)
        elif action == 2:
            del data[place:]
        elif action == 3:
            del data[place : place + rng.randrange(1, 20)]
        elif action == 4:
            data[place:place] = rng.randbytes(rng.randrange(1, 20))
        else:
            data[place:place] = data[place : place + rng.randrange(1, 60)]
    return bytes(data)


def mutate_length(rng, data):
    length = int.from_bytes(data[:8], "little")
    new = rng.choice(
        [0, 1, length - 1, length + 1, len(data) - 8, len(data), 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)]
    )
    return new.to_bytes(8, "little") + data[8:]


def move(rng, header):
    """Changes where tensors lie, so that their sizes still fit."""
    names = [name for name in header if name != "__metadata__"]
    offsets = header[rng.choice(names)]["data_offsets"]
    if rng.random() < 0.5:
        by = rng.choice([-1600, -16, -8, -1, 1, 8, 16, 2**40])
        offsets[:] = [offsets[0] + by, offsets[1] + by]
    else:
        other = header[rng.choice(names)]["data_offsets"]
        offsets[:] = [other[0], other[0] + offsets[1] - offsets[0]]
    return header


def mutate_header(rng, data):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.2:
        header = move(rng, header)
    else:
        for _ in range(rng.choice([1, 1, 2])):
            header = bend(rng, header)
    text = json.dumps(header, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
    if rng.random() < 0.1:  # a key twice
        text = text.replace(b"{", b'{"flag": {"dtype": "BOOL", "shape": [2], "data_offsets": [136, 138]}, ', 1)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def mutate_index(rng, data):
    return json.dumps(bend(rng, bend(rng, json.loads(data)))).encode()


def mutant(rng, files):
    """One file with another content, None where it is gone."""
    file = rng.choice([*FILES, *FILES, INDEX])
    how = rng.random()
    if how < 0.02:
        return file, None
    if how < 0.45:
        return file, mutate_bytes(rng, files[file])
    if file == INDEX:
        return file, mutate_index(rng, files[file])
    return file, (mutate_length if how < 0.5 else mutate_header)(rng, files[file])


STRICTER = [  # what the library takes and we refuse, each with a test of its own in test_header.py
    "more than once",
    "once each, and nothing else",
    "which torch cannot hold",
    "larger than any tensor",
    "the index",  # which the library does not look at
    "in several files",
]


def read_all(directory):
    source = open_checkpoint(directory)
    return {name: source.read(Region.whole(name, source[name])) for name in source}


def reference(directory):
    """What the library reads from the files, None where it refuses any."""
    found = {}
    try:
        for file in FILES:
            with safe_open(directory / file, framework="pt") as content:
                found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return None
    return found


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        and bits(tensor).equal(bits(theirs[name]))
        for name, tensor in ours.items()
    )


def fuzz(directory, count, seed):
    """Runs mutations; how many opened, and how many were refused for which reason."""
    files = make(directory)
    rng = random.Random(seed)
    opened_well, refused = 0, 0
    base = str(directory)
    mutated = INDEX
    for _ in range(count):
        file, content = mutant(rng, files)
        path = directory / file
        if mutated != file:
            (directory / mutated).write_bytes(files[mutated])
            mutated = file
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)
        try:
            with paths_opened() as paths:
                try:
                    found = read_all(directory)
                except ALLOWED as error:
                    found = None
                    message = str(error)
        except BaseException:  # whatever it is: without the mutant nobody could look into it
            sys.stderr.write(f"mutant of {file}: {content!r}\n")
            raise
        outside = [path for path in paths if not path.startswith(base + os.sep) or os.sep in path[len(base) + 1 :]]
        assert not outside, (file, content, outside)
        if found is None:
            refused += 1
            # one error, which says what it is about and is not a dump
            assert base in message or file in message, (file, content, message)
            assert len(message) < 20_000, (file, content, message)
            if rng.random() < 0.2 and file != INDEX and reference(directory) is not None:
                assert any(reason in message for reason in STRICTER), (file, content, message)
        else:
            opened_well += 1
            theirs = reference(directory)
            assert theirs is not None, (file, content)
            assert same(found, theirs), (file, content)
        if rng.random() < 0.05:  # it never raises, and finds what opening stumbles over
            report = verify(directory, values=True)
            assert found is not None or not report.sound, (file, content, message)
    return opened_well, refused


def test_a_sample_of_mutations(directory):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened_well, refused = fuzz(directory, 2_000, seed=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert opened_well > 100  # the mutations are not all hopeless,
    assert refused > 1000  # nor harmless


@pytest.mark.long
def test_a_hundred_thousand_mutations(directory):
    opened_well, refused = fuzz(directory, 100_000, seed=2)
    assert opened_well > 5_000
    assert refused > 50_000


def test_mutated_job_checkpoints(directory):
    """Manifests and files of ranks: what was saved comes back, or one error."""
    torch.manual_seed(0)
    rng = random.Random(3)
    tensors = {"w": torch.randn(5, 4), "step": torch.tensor(3), "flags": torch.tensor([True, False])}
    JobCheckpoints(directory).save(1, tensors, shared={"a": [1, 2]}, per_rank={"rng": torch.arange(4)})
    (job,) = directory.glob("step-*")
    files = {path.name: path.read_bytes() for path in job.iterdir()}
    opened_well = refused = 0
    for _ in range(600):
        manifest = rng.random() < 0.6
        file = "manifest.json" if manifest else "rank-00000.safetensors"
        mutate = mutate_index if manifest and rng.random() < 0.7 else mutate_bytes
        content = mutate(rng, files[file])
        (job / file).write_bytes(content)
        with paths_opened() as paths:
            try:
                source = JobCheckpoint(job).source
                found = {name: source.read(Region.whole(name, source[name])) for name in source}
            except (*ALLOWED, UnknownFormatError):
                refused += 1
            else:
                opened_well += 1
                # a manifest may call a tensor otherwise, but its bytes are those that were saved
                saved = {bytes(bits(tensor).tolist()) for tensor in tensors.values()}
                assert all(bytes(bits(tensor).tolist()) in saved for tensor in found.values()), content
        assert not [path for path in paths if Path(path).parent != job], (content, paths)
        verify(job)
        (job / file).write_bytes(files[file])
    assert opened_well > 20
    assert refused > 300


def test_lies_about_sizes_take_no_memory(tmp_path):
    """Headers that ask for terabytes are refused before anything is allocated."""
    for nbytes in (2**31, 2**40, 2**62):
        header = {"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
        text = json.dumps(header).encode()
        (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        tracemalloc.start()
        with pytest.raises(ValueError, match="it ends in 'a'"):
            open_checkpoint(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
