"""The source files of Python's standard library as byte-level training samples.

The text is on every machine that can run this: nothing is downloaded, nothing is shipped.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

IGNORED = -100
_NOT_LIBRARY = {"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


@attrs.frozen
class Sample:
    """Part of one file."""

    tokens: Tensor
    """uint8, (at most sequence + 1,): each predicts the next."""


class ByteWindows:
    """Files cut into windows that never cross from one file to the next, so that the last one of a file is short.

    Args:
        files: Contents.
        sequence: Largest number of predictions in a window.

    Raises:
        ValueError: If no file has two bytes.
    """

    def __init__(self, files: Sequence[bytes], sequence: int) -> None:
        if all(len(content) < 2 for content in files):
            raise ValueError(
                f"{len(files)} files without any sample; one of at least two bytes is needed (held_out_bytes?)"
            )
        self._text = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
        self._windows: list[tuple[int, int]] = []
        start = 0
        for content in files:
            end = start + len(content)
            # Windows overlap by one byte: the last one of a window is predicted there, and predicts in the next.
            self._windows += [(at, min(at + sequence + 1, end)) for at in range(start, end - 1, sequence)]
            start = end

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int, /) -> Sample:
        start, end = self._windows[index]
        return Sample(self._text[start:end])


def collate(samples: Sequence[Sample], *, sequence: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, int64 (B, sequence); short samples are filled up, without labels there."""
    inputs = torch.zeros(len(samples), sequence, dtype=torch.int64)
    labels = torch.full((len(samples), sequence), IGNORED, dtype=torch.int64)
    for row, sample in enumerate(samples):
        length = len(sample.tokens) - 1
        inputs[row, :length] = sample.tokens[:-1]
        labels[row, :length] = sample.tokens[1:]
    return inputs, labels


def read_library(*, held_out_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """Contents of the library's files, to train on and held out.

    Names alone decide which files are held out, apart from large ones: none of them shall be most of the comparison.

    Args:
        held_out_bytes: About how much to hold out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [path for path in files if _NOT_LIBRARY.isdisjoint(path.parts)]
    files.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    train: list[bytes] = []
    held_out: list[bytes] = []
    left = held_out_bytes
    for path in files:
        content = (root / path).read_bytes()
        if left > 0 and len(content) <= held_out_bytes // 8:
            held_out.append(content)
            left -= len(content)
        else:
            train.append(content)
    return train, held_out
