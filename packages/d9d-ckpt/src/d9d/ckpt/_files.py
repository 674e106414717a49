"""Writing safetensors files, tensor by tensor, and making files durable."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ._dtypes import DTYPE_NAMES
from ._memory import memory_of
from ._parse_json import is_text
from ._spec import TensorSpec


class TensorFileWriter:
    """Writes a safetensors file of known specs, one tensor at a time, in any order. A context manager.

    The file depends on the specs and the data alone: tensors lie in it by falling size of their elements (so that
    all are aligned), then by name. Leaving the context without an error makes the file durable.

    Raises:
        ValueError: A spec has a dtype that the format lacks, or a name that it cannot hold or keeps for itself.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self.path = path
        self.specs = specs
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        if not header.keys().isdisjoint(specs):
            raise ValueError("a tensor cannot be called '__metadata__' in a safetensors file: rename it")
        end = 0
        for name, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            if not is_text(name):
                raise ValueError(f"{name!r} has half of a character, which safetensors files cannot hold: rename it")
            if spec.dtype not in DTYPE_NAMES:
                raise ValueError(f"{name!r} has dtype {spec.dtype}, which safetensors files cannot hold")
            start, end = end, end + spec.nbytes
            self._starts[name] = start
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self.nbytes = self._base + end
        """Size of the finished file."""
        self._left = set(specs)
        self._file = path.open("xb", buffering=0)
        try:
            self._write_all(memoryview(len(text).to_bytes(8, "little") + text))
            with _naming(path):
                self._file.truncate(self.nbytes)
        except BaseException:  # an interrupt too: nobody else has this file to close it
            self._file.close()
            raise

    def write(self, name: str, tensor: Tensor) -> int:
        """Writes a tensor, which may be on any device, and returns the CRC-32 of its bytes.

        Raises:
            ValueError: It differs from its spec.
        """
        if TensorSpec.of(tensor) != self.specs[name]:
            raise ValueError(f"{name!r} should be {self.specs[name]}, got {TensorSpec.of(tensor)}")
        # conjugates and negatives may be flags on the memory of others
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        view = memory_of(tensor)
        self._reopen()
        self._file.seek(self._base + self._starts[name])
        self._write_all(view)
        self._left.discard(name)
        return zlib.crc32(view)

    def rest(self) -> None:
        """Closes the file until more is written: a process may have few open."""
        self._file.close()

    def _reopen(self) -> None:
        if self._file.closed:
            self._file = self.path.open("r+b", buffering=0)

    def _write_all(self, data: memoryview) -> None:
        with _naming(self.path):
            while data:  # a single write stops at 2 GiB
                data = data[self._file.write(data) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and not self._left:
            self._reopen()
        with self._file:
            if error is None:
                if self._left:
                    raise ValueError(f"{str(self.path)!r} was left without {sorted(self._left)}")
                os.fsync(self._file.fileno())


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Says which file it was: errors of a full disk do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Writes a new file and makes it durable."""
    with _naming(path), path.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Makes a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    sync_file(path)
