"""The loss by Triton kernels.

Shapes: C tokens, V classes of this rank.
"""

from typing import Any

import torch
from torch import Tensor

from ._kernel import scale_unless_one
from ._labels import counted
from ._launches import Chunk, Columns, Rows
from ._options import LossOptions
from ._vocabulary import VocabularyShard

SCALE_STEPS, SCALE_BLOCK = 64, 4096


def triton_chunk_loss_(
    logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    *,
    options: LossOptions,
    shard: VocabularyShard | None,
    with_gradient: bool,
) -> Tensor:
    """See `ChunkLoss`. Logits of a token lie side by side, or those of a class, in a dtype of at most 32 bits."""
    labels_C = labels_C.contiguous()  # kernels know no stride of these
    weights_C = None if weights_C is None else weights_C.contiguous()
    chunk_of = Rows if logits_CV.stride(1) == 1 else Columns
    chunk = chunk_of(logits_CV, labels_C, weights_C, options, shard)
    with torch.cuda.device_of(logits_CV):  # Triton launches on the current device
        if isinstance(chunk, Rows) and with_gradient and shard is None:
            return chunk.losses_and_gradient_()
        log_norm_C, losses_C = _losses(chunk)
        if with_gradient:
            chunk.gradient_(log_norm_C)
    return losses_C


def triton_scale_(gradient: Tensor, factor_1: Tensor) -> None:
    """See `ChunkFunctions`: the upstream gradient of a sum mostly is 1, which the host does not know."""
    programs = -(-gradient.numel() // (SCALE_STEPS * SCALE_BLOCK))
    if programs:
        kernel: Any = scale_unless_one[(programs,)]
        with torch.cuda.device_of(gradient):
            kernel(gradient, factor_1, gradient.numel(), STEPS=SCALE_STEPS, BLOCK=SCALE_BLOCK)


def _losses(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The log-partitions over the classes of all ranks, and the losses."""
    statistics_4C = chunk.statistics()
    top, total, pull, plain_sum = statistics_4C.unbind()
    shard, options = chunk.shard, chunk.options
    if shard is not None:
        highest = top.clone()
        shard.max_(highest)
        total.mul_((top - highest).exp_())
        shard.sum_(statistics_4C[1:])
        top = highest
    log_norm_C = top + total.log()
    losses_C = log_norm_C - (1 - options.label_smoothing) * pull + options.z_loss * log_norm_C.square()
    if options.label_smoothing:
        losses_C.sub_(options.label_smoothing / chunk.classes * plain_sum)
    if chunk.weights_C is not None:
        losses_C.mul_(chunk.weights_C)
    return log_norm_C, losses_C.where(counted(chunk.labels_C, chunk.weights_C, options.ignore_index), 0.0)
