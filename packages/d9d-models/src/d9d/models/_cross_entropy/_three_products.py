"""The sum of the losses of all tokens with its gradients, chunk by chunk of tokens.

The gradient of a chunk's logits is known as soon as they are, up to the gradient of the sum, which is one number. So
the gradients of hidden states, weight and bias are made at once: three matrix products, where recomputing the logits
in backward takes four.

Shapes: N tokens, C of them in a chunk, H hidden size, V classes of this rank.
"""

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

from ._chunk_sizes import chunks, even_chunk
from ._gradients import Gradients
from ._labels import counted, without_uncounted
from ._options import LossOptions
from ._products import multiply, wide
from ._vocabulary import VocabularyShard


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
    ) -> Tensor:
        """The losses (C,), fp32 or fp64; puts the gradient of their sum in the logits' place.

        Logits of a token lie side by side, or those of a class. Without ``with_gradient`` nobody looks at them again.
        """
        ...


@attrs.frozen(kw_only=True)
class ChunkFunctions:
    """A backend that goes chunk by chunk."""

    loss_: ChunkLoss
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
    functions: ChunkFunctions,
    precision: Precision,
) -> tuple[Tensor, Gradients]:
    """The sum, 0-dim, and its gradients; ``needs`` says which: of hidden states, weight, bias."""
    gradients = Gradients.new(hidden_NH, weight_VH, needs=needs, shard=shard, weight_dtype=precision.weight_gradient)
    weight_VH = weight_VH.to(hidden_NH.dtype)
    size = even_chunk(len(hidden_NH), chunk)
    lent = None
    if 2 * size < len(hidden_NH) and precision.logits == hidden_NH.dtype:
        lent = gradients.memory_for_logits(len(hidden_NH), precision.logits)
    memory = hidden_NH.new_empty((size, len(weight_VH)), dtype=precision.logits) if lent is None else lent
    counted_N = counted(labels_N, weights_N, options.ignore_index)
    losses = [hidden_NH.new_zeros(1, dtype=wide(hidden_NH.dtype))]
    for rows in chunks(len(hidden_NH), len(memory)):
        hidden = without_uncounted(hidden_NH[rows], counted_N[rows])
        logits = multiply(hidden, weight_VH.T, memory[: len(hidden)])
        if bias_V is not None:
            logits += bias_V
        labels, weights = labels_N[rows], None if weights_N is None else weights_N[rows]
        # Chunk by chunk in any case: the loss may take as much memory again, and is where ranks meet, of whom some may
        # have lent memory and others not.
        for part in chunks(len(hidden), size):
            loss_C = functions.loss_(
                logits[part],
                labels[part],
                None if weights is None else weights[part],
                options=options,
                shard=shard,
                with_gradient=any(needs),
            )
            losses.append(loss_C)
        if lent is not None:
            gradients.replace_(logits, hidden, weight_VH, chunk * len(weight_VH) * precision.logits.itemsize // 2)
        elif any(needs):
            gradients.add_(rows, logits, hidden, weight_VH)
    return torch.cat(losses).sum(), gradients.finished(hidden_NH.dtype, shard)
