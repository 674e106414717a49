"""How fast checkpoints are loaded and converted, beside others, and how much memory and reading that takes.

    uv run tools/bench_checkpoint.py --gib 4

Loading: a dense decoder in bfloat16 in one file, in the page cache. Each turn starts with the module on meta and ends
with all of its parameters there, and ends a second time when each has been changed once in place: a loader that maps
the file has read nothing before that. The turns of all ways are taken one after the other, so that each meets the same
machine, and the best counts: fresh memory of a virtual machine may cost several times what it costs at best. "bytes"
reads the file into the memory of such a module, by as many threads as we use, and does nothing else.
Converting: experts in tensors of their own to stacked ones and back, beside a copy of the file; both are made durable.
Memory is anonymous memory beyond the model, the highest of what another thread sees each millisecond, each in a
process of its own.
"""

import argparse
import ctypes
import gc
import hashlib
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from d9d.ckpt import Identity, Mapper, Stack, TensorSpec, convert, load, open_checkpoint
from d9d.ckpt._files import TensorFileWriter
from d9d.ckpt._header import read_header
from d9d.ckpt._memory import memory_of
from d9d.ckpt._stream import count_threads
from d9d.mesh.testing import run_world, stop_worlds

MIB = 1 << 20
EXPERTS = 32


def hugging_face() -> Any:
    """The library that others load with."""
    import transformers  # noqa: PLC0415  # workers of test worlds import this file without needing it

    return transformers


def decoder_config(nbytes: int) -> Any:
    """A config of transformers, whose parameters have about `nbytes` in bfloat16."""
    hidden, inner = 2048, 5632
    layer = (2 * hidden * hidden + 2 * hidden * hidden // 4 + 3 * hidden * inner) * 2
    return hugging_face().LlamaConfig(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=inner, num_attention_heads=16, num_key_value_heads=4,
        num_hidden_layers=max(1, (nbytes - 2 * 32_000 * hidden * 2) // layer), tie_word_embeddings=False,
    )  # fmt: skip


def empty_decoder(config: Any, device: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = hugging_face().LlamaForCausalLM(config).to(torch.bfloat16)
    return model if device == "meta" else model.to_empty(device=device)


def write_random(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    generator = torch.Generator().manual_seed(0)
    with TensorFileWriter(path, specs) as writer:
        for name, spec in specs.items():
            bits = torch.empty(spec.shape, dtype=torch.int16).random_(0, 1 << 14, generator=generator)
            writer.write(name, bits.view(spec.dtype))


def into_cache(path: Path) -> int:
    for file in path.rglob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.read(16 * MIB):
                pass
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))


def read_bytes(directory: Path) -> object:
    """The bytes of the file into the memory of a module, by as many threads as load uses, and nothing else."""
    model = empty_decoder(hugging_face().LlamaConfig.from_pretrained(directory), "cpu")
    file = directory / "model.safetensors"
    entries, state = read_header(file).entries, model.state_dict()
    descriptor = os.open(file, os.O_RDONLY)

    def read(piece: tuple[memoryview, int]) -> None:
        view, start = piece
        while view:
            count = os.preadv(descriptor, [view], start)
            start, view = start + count, view[count:]

    pieces = [
        (memory_of(state[name])[first : first + 4 * MIB], entry.start + first)
        for name, entry in entries.items()
        for first in range(0, entry.stop - entry.start, 4 * MIB)
    ]
    with ThreadPoolExecutor(count_threads()) as pool:
        list(pool.map(read, pieces))
    os.close(descriptor)
    return state


def by_ours(directory: Path) -> nn.Module:
    model = empty_decoder(hugging_face().LlamaConfig.from_pretrained(directory), "cpu")
    load(open_checkpoint(directory), Identity(), model.state_dict())
    return model


def by_load_file(directory: Path) -> nn.Module:
    model = empty_decoder(hugging_face().LlamaConfig.from_pretrained(directory), "cpu")
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model


def by_transformers(directory: Path) -> nn.Module:
    model: nn.Module = hugging_face().LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model


def change(model: nn.Module) -> None:
    """Changes all parameters in place, as a step of an optimizer does: then they are in memory of their own."""
    for parameter in model.parameters():
        parameter.data.view(torch.int16).add_(1)


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@contextmanager
def peak_memory() -> Generator[list[int]]:
    """A list that gets the highest anonymous memory above that at the start."""
    ctypes.CDLL(None).malloc_trim(0)
    base, over, found = anonymous(), threading.Event(), [0]

    def look() -> None:
        while not over.wait(0.001):
            found[0] = max(found[0], anonymous() - base)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def load_memory(directory: Path, sender: Any) -> None:
    """The peak beyond the model of our loading, and the bytes of the model."""
    model = empty_decoder(hugging_face().LlamaConfig.from_pretrained(directory), "cpu")
    for parameter in model.parameters():
        parameter.data.zero_()  # it is there before
    with peak_memory() as peak:
        load(open_checkpoint(directory), Identity(), model.state_dict())
    sender.send((peak[0], sum(p.nbytes for p in model.parameters())))


def convert_memory(source: Path, target: Path, mapper: Mapper, sender: Any) -> None:
    """The peak of a conversion, and its seconds."""
    opened = open_checkpoint(source)
    with peak_memory() as peak:
        start = time.perf_counter()
        convert(opened, mapper, target)
        seconds = time.perf_counter() - start
    sender.send((peak[0], seconds))


def in_process(function: Callable[..., None], *arguments: object) -> Any:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*arguments, sender))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    return found


def read_quarter(directory: Path) -> int:
    """Bytes that this rank of four reads for its quarter of everything."""
    mesh = init_device_mesh("cpu", (4,))
    source = open_checkpoint(directory)
    state = {}
    for number, (name, spec) in enumerate(source.items()):
        dim = number % len(spec.shape)
        shape = list(spec.shape)
        shape[dim] //= 4
        local = torch.empty(shape, dtype=spec.dtype)
        state[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    total, lock, original = [0], threading.Lock(), os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        count = original(descriptor, buffers, offset)
        with lock:
            total[0] += count
        return count

    with mock.patch("os.preadv", preadv):
        load(source, Identity(), state)
    return total[0]


def bench_loading(root: Path, nbytes: int, turns: int) -> None:
    directory = root / "dense"
    directory.mkdir()
    config = decoder_config(nbytes)
    specs = {name: TensorSpec.of(value) for name, value in empty_decoder(config, "meta").state_dict().items()}
    write_random(directory / "model.safetensors", specs)
    config.save_pretrained(directory)
    size = into_cache(directory)
    ways: dict[str, Callable[[], object]] = {
        "bytes": lambda: read_bytes(directory),
        "d9d.ckpt.load": lambda: by_ours(directory),
        "load_file + load_state_dict": lambda: by_load_file(directory),
        "transformers": lambda: by_transformers(directory),
    }
    turns_of: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(turns + 1):  # the first warms up
        for name, way in ways.items():
            gc.collect()
            start = time.perf_counter()
            result = way()
            loaded = time.perf_counter()
            if isinstance(result, nn.Module):
                change(result)
            if turn:
                turns_of[name].append((loaded - start, time.perf_counter() - start))
            del result
    best = {name: [min(column) for column in zip(*found)] for name, found in turns_of.items()}
    print(f"load {size / 1e9:.2f} GB in {len(specs)} tensors, best of {turns} turns; then with one change in place")
    for name, (loaded, changed) in best.items():
        ratios = [ours / theirs for ours, theirs in zip(best["d9d.ckpt.load"], (loaded, changed))]
        print(
            f"  {name:<28} {loaded:6.2f} s  {size / loaded / 1e9:6.2f} GB/s  ours takes {ratios[0]:5.2f} of it", end=""
        )
        print("" if name == "bytes" else f";  {changed:6.2f} s, ours takes {ratios[1]:5.2f} of it")
    peak, model = in_process(load_memory, directory)
    largest = max(spec.nbytes for spec in specs.values())
    print(f"  memory beyond the model of {model / MIB:.0f} MiB: {peak / MIB:.0f} MiB")
    print(f"  largest group + 64 MiB: {largest / MIB + 64:.0f} MiB")
    counts = run_world(4, read_quarter, directory, timeout=300.0)
    stop_worlds()
    print(f"four ranks that need a quarter each read {sum(counts) / size:.4f} of the checkpoint")
    shutil.rmtree(directory)


def bench_converting(root: Path, nbytes: int) -> None:
    directory = root / "experts"
    directory.mkdir()
    spec = TensorSpec([1536, 2048], torch.bfloat16)
    layers = max(1, nbytes // (spec.nbytes * EXPERTS))
    names = [f"layers.{layer}.experts.{expert}.up" for layer in range(layers) for expert in range(EXPERTS)]
    write_random(directory / "model.safetensors", dict.fromkeys(names, spec))
    size = into_cache(directory)
    stack = Stack("layers.{layer}.experts.{expert}.up", "layers.{layer}.experts.up", count=EXPERTS)
    print(f"convert {size / 1e9:.2f} GB, {layers} groups of {EXPERTS} tensors of {spec.nbytes / MIB:.0f} MiB")
    before = digest(directory / "model.safetensors")
    copied = copy_durably(directory / "model.safetensors", root / "copy")
    print(f"  {'a copy of the file':<28} {copied:6.2f} s  {size / copied / 1e9:5.2f} GB/s")
    for name, source, target, mapper in (
        ("to stacked", directory, root / "stacked", stack),
        ("to one by one", root / "stacked", root / "back", stack.inverse()),
    ):
        peak, seconds = in_process(convert_memory, source, target, mapper)
        ratio = seconds / copied
        print(f"  {name:<28} {seconds:6.2f} s  {size / seconds / 1e9:5.2f} GB/s  {ratio:5.2f} of the copy's time")
        print(f"    memory {peak / MIB:.0f} MiB; group + 64 MiB: {2 * EXPERTS * spec.nbytes / MIB + 64:.0f} MiB")
        shutil.rmtree(source)
    same = digest(root / "back" / "model.safetensors") == before
    print(f"  there and back is {'byte-identical' if same else 'NOT THE SAME'}")


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def copy_durably(source: Path, target: Path) -> float:
    start = time.perf_counter()
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while data := reader.read(4 * MIB):
            writer.write(data)
        os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the files are for a while; by default of the system")
    arguments = parser.parse_args()
    nbytes = int(arguments.gib * (1 << 30))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        bench_loading(Path(root), nbytes, arguments.turns)
        bench_converting(Path(root), nbytes)


if __name__ == "__main__":
    main()
