"""The loss by Triton kernels.

Shapes: C tokens, V classes of this rank.
"""

from typing import Any

import torch
from torch import Tensor

from ._kernel import scale_unless_one, softmax_rows
from ._options import LossOptions
from ._vocabulary import VocabularyShard

MAX_BLOCK = 4096
WARPS = 8
SCALE_STEPS, SCALE_BLOCK = 64, 4096


def triton_chunk_loss(
    logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    *,
    options: LossOptions,
    shard: VocabularyShard | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """See `ChunkLoss`. Logits are contiguous, in a dtype of at most 32 bits."""
    rows, columns = logits_CV.shape
    classes = columns if shard is None else shard.total
    statistics = logits_CV.new_empty((4, rows), dtype=torch.float32)
    log_norm_C = torch.empty_like(statistics[0])
    losses_C = torch.empty_like(statistics[0])

    kernel: Any = softmax_rows[(rows,)]

    def launch(*, make_statistics: bool, make_gradient: bool) -> None:
        kernel(
            logits_CV,
            labels_C,
            losses_C if weights_C is None else weights_C,
            statistics,
            log_norm_C,
            losses_C,
            logits_CV.stride(0),
            rows,
            classes,
            0 if shard is None else shard.start,
            options.ignore_index,
            options.label_smoothing,
            options.z_loss,
            1.0 if options.soft_cap is None else options.soft_cap,
            COLUMNS=columns,
            HAS_WEIGHTS=weights_C is not None,
            HAS_CAP=options.soft_cap is not None,
            HAS_SMOOTHING=options.label_smoothing > 0,
            STATISTICS=make_statistics,
            GRADIENT=make_gradient,
            BLOCK=min(MAX_BLOCK, 1 << max(4, (columns - 1).bit_length())),  # a power of 2
            num_warps=WARPS,
        )

    if shard is None and with_gradient:
        launch(make_statistics=True, make_gradient=True)
        return losses_C, logits_CV
    launch(make_statistics=True, make_gradient=False)
    top, total, pull, plain_sum = statistics.unbind()
    if shard is not None:
        highest = top.clone()
        shard.max_(highest)
        total.mul_((top - highest).exp_())
        shard.sum_(statistics[1:])
        top = highest
    log_norm_C.copy_(top + total.log())
    smoothing = options.label_smoothing
    losses_C.copy_(log_norm_C - (1 - smoothing) * pull + options.z_loss * log_norm_C.square())
    if smoothing:
        losses_C.sub_(smoothing / classes * plain_sum)
    if weights_C is not None:
        losses_C.mul_(weights_C)
    losses_C.masked_fill_(labels_C == options.ignore_index, 0.0)
    if with_gradient:
        launch(make_statistics=False, make_gradient=True)
    return losses_C, logits_CV


def triton_scale_(gradient: Tensor, factor_1: Tensor) -> None:
    """See `ChunkFunctions`: the upstream gradient of a sum mostly is 1, which the host does not know."""
    programs = -(-gradient.numel() // (SCALE_STEPS * SCALE_BLOCK))
    if programs:
        kernel: Any = scale_unless_one[(programs,)]
        kernel(gradient, factor_1, gradient.numel(), STEPS=SCALE_STEPS, BLOCK=SCALE_BLOCK)
