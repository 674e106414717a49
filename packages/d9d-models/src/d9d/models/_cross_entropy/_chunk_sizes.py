"""How many tokens, or classes, are taken at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._vocabulary import VocabularyShard

ALIGNMENT = 256
"""Chunks are multiples of so many rows, where memory allows for that: tiles of a matrix product."""


def rows_within(
    max_logits_bytes: int, weight_VH: Tensor, shard: VocabularyShard | None, logits_dtype: torch.dtype
) -> int:
    """How many tokens a chunk may have: as many on all ranks."""
    classes = weight_VH.shape[0] if shard is None else shard.length
    return max(1, max_logits_bytes // max(1, classes * logits_dtype.itemsize))


def even_chunk(rows: int, most: int) -> int:
    """How many rows a chunk has, so that all have about as many: a small last one costs nearly as much as a whole."""
    most = most if most <= ALIGNMENT else most - most % ALIGNMENT
    even = -(-rows // max(1, -(-rows // most)))
    return even if even <= ALIGNMENT else -(-even // ALIGNMENT) * ALIGNMENT


def chunks(rows: int, chunk: int) -> Iterator[slice]:
    """Slices of at most ``chunk`` rows."""
    return (slice(start, start + chunk) for start in range(0, rows, max(1, chunk)))
