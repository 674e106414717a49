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
        sizes = [size * dtype.itemsize for size, dtype in self.parts]
        lengths = [length for size in sizes for length in (size, _padded(size) - size)]
        columns = packed_NB.split(lengths, dim=1)[::2]
        return [part.view(dtype) for part, (_, dtype) in zip(columns, self.parts)]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
