"""Memory for what passes through."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_MAPPED = 1 << 20


def buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose memory goes back to the system as soon as nobody has it.

    The C library keeps up to 64 MiB of freed blocks that are smaller than 32 MiB, and what lies between such in use.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MAPPED:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(tuple(shape))
