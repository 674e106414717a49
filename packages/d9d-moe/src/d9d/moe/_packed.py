"""Several tensors side by side in one row of bytes, so that one collective moves them all.

Shapes: N rows, B bytes of a row.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: every part, and every row, starts at a multiple, as vector loads want it."""


@attrs.frozen
class PackedRows:
    """Where the parts of a row lie."""

    parts: Sequence[tuple[int, torch.dtype]]
    """Numbers of each part of a row, and their dtype."""

    def new(self, rows: int, device: torch.device) -> Tensor:
        """Memory for so many rows: (N, B), uint8."""
        size = sum(_padded(size * dtype.itemsize) for size, dtype in self.parts)
        return torch.empty((rows, size), dtype=torch.uint8, device=device)

    def views(self, packed_NB: Tensor) -> list[Tensor]:
        """The parts of rows, each (N, numbers), in their memory."""
        found, start = [], 0
        for size, dtype in self.parts:
            stop = start + size * dtype.itemsize
            found.append(packed_NB[:, start:stop].view(dtype))
            start += _padded(stop - start)
        return found


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
