"""The sum of the losses of all tokens with its gradients, chunk by chunk of tokens.

The gradient of a chunk's logits is known as soon as they are, up to the gradient of the sum, which is one number. So
the gradients of hidden states, weight and bias are made at once: three matrix products, where recomputing the logits
in backward takes four.

Shapes: N tokens, C of them in a chunk, H hidden size, V classes of this rank.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import torch
from torch import Tensor

from ._gradients import Gradients
from ._labels import counted, without_uncounted
from ._options import LossOptions
from ._products import multiply, wide
from ._vocabulary import VocabularyShard

ALIGNMENT = 256
"""Chunks are multiples of so many tokens, where memory allows for that: tiles of a matrix product."""


class ChunkLoss(Protocol):
    """What a backend makes of the logits of a chunk."""

    def __call__(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        weights_C: Tensor | None,
        *,
        options: LossOptions,
        shard: VocabularyShard | None,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """The losses (C,), fp32 or fp64, and the gradient of their sum, which may lie in the logits' memory.

        Without ``with_gradient`` nobody looks at the second.
        """
        ...


@attrs.frozen(kw_only=True)
class ChunkFunctions:
    """A backend that goes chunk by chunk."""

    loss: ChunkLoss
    """Of the logits of a chunk."""

    scale_: Callable[[Tensor, Tensor], None]
    """Multiplies a gradient, whose numbers lie side by side in some order, by one number in fp32 or fp64, (1,)."""


@attrs.frozen(kw_only=True)
class Precision:
    """Dtypes on the way."""

    logits: torch.dtype
    """Of the logits of a chunk."""

    weight_gradient: torch.dtype
    """In which the gradients of weight and bias are summed over chunks."""


@torch.no_grad()
def sum_and_gradients(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor | None,
    *,
    options: LossOptions,
    shard: VocabularyShard | None,
    chunk: int,
    needs: tuple[bool, bool, bool],
    chunk_loss: ChunkLoss,
    precision: Precision,
) -> tuple[Tensor, Gradients]:
    """The sum, 0-dim, and its gradients; ``needs`` says which: of hidden states, weight, bias."""
    gradients = Gradients.new(hidden_NH, weight_VH, needs=needs, shard=shard, weight_dtype=precision.weight_gradient)
    total = hidden_NH.new_zeros((), dtype=wide(hidden_NH.dtype))
    weight_VH = weight_VH.to(hidden_NH.dtype)
    chunk = even_chunk(len(hidden_NH), chunk)
    memory = hidden_NH.new_empty((chunk, len(weight_VH)), dtype=precision.logits)
    counted_N = counted(labels_N, weights_N, options.ignore_index)
    for rows in chunks(len(hidden_NH), chunk):
        hidden = without_uncounted(hidden_NH[rows], counted_N[rows])
        logits = multiply(hidden, weight_VH.T, memory[: len(hidden)])
        if bias_V is not None:
            logits += bias_V
        losses, gradient = chunk_loss(
            logits,
            labels_N[rows],
            None if weights_N is None else weights_N[rows],
            options=options,
            shard=shard,
            with_gradient=any(needs),
        )
        total += losses.sum()
        if any(needs):
            gradients.add_(rows, gradient, hidden, weight_VH)
    return total, gradients.finished(hidden_NH.dtype, shard)


def rows_within(
    max_logits_bytes: int, weight_VH: Tensor, shard: VocabularyShard | None, logits_dtype: torch.dtype
) -> int:
    """How many tokens a chunk may have: as many on all ranks."""
    classes = weight_VH.shape[0] if shard is None else shard.length
    chunk = max(1, max_logits_bytes // max(1, classes * logits_dtype.itemsize))
    return chunk if chunk <= ALIGNMENT else chunk - chunk % ALIGNMENT


def even_chunk(rows: int, most: int) -> int:
    """How many rows a chunk has, so that all have about as many: a small last one costs nearly as much as a whole."""
    even = -(-rows // max(1, -(-rows // most)))
    return even if even <= ALIGNMENT else -(-even // ALIGNMENT) * ALIGNMENT


def chunks(rows: int, chunk: int) -> Iterator[slice]:
    """Slices of at most ``chunk`` rows."""
    return (slice(start, start + chunk) for start in range(0, rows, max(1, chunk)))
