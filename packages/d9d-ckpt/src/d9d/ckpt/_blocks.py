"""The data of a tensor in a file, piece by piece in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ._header import Entry

BLOCK_BYTES = 16 << 20
"""Size of a piece: large enough for the speed of the disk, small beside any machine's memory."""


def blocks(path: Path, entry: Entry) -> Iterator[Tensor]:
    """The elements of a tensor in order, as one-dimensional tensors, each valid until the next is taken.

    Raises:
        OSError: The file cannot be read, or is shorter than it was.
    """
    buffer = bytearray(min(BLOCK_BYTES, entry.stop - entry.start))
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        left = entry.stop - entry.start
        while left:
            view = memoryview(buffer)[: min(left, BLOCK_BYTES)]
            left -= len(view)
            size = len(view)
            while view:  # a read may stop early
                got = file.readinto(view)
                if not got:
                    raise OSError(f"{str(path)!r} ended {left + len(view)} bytes before the end of a tensor")
                view = view[got:]
            yield torch.frombuffer(buffer, dtype=torch.uint8, count=size).view(entry.spec.dtype)
