"""The loss in plain torch: the oracle, and the default on every device."""

from typing import ClassVar

import attrs
from torch import Tensor

from ._backend import LinearCrossEntropy, LinearCrossEntropyConfig, LossCapabilities, linear_cross_entropy_backends
from ._chunked import CHUNK_FUNCTIONS, ChunkedLinearCrossEntropy
from ._options import LossOptions
from ._softmax import Targets, cap_, cap_slope, gradient_, log_partition, losses
from ._three_products import ChunkFunctions
from ._vocabulary import VocabularyShard


def torch_chunk_loss_(
    logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    *,
    options: LossOptions,
    shard: VocabularyShard | None,
    with_gradient: bool,
) -> Tensor:
    """See `ChunkLoss`."""
    targets = Targets.of(labels_C, weights_C, logits_CV.shape[1], options.ignore_index, shard)
    if options.soft_cap is not None:
        cap_(logits_CV, options.soft_cap)
    log_norm_C1 = log_partition(logits_CV, shard)
    losses_C1 = losses(logits_CV, log_norm_C1, targets, options, shard)
    if with_gradient:
        slope = None if options.soft_cap is None else cap_slope(logits_CV, options.soft_cap)
        gradient_(logits_CV, log_norm_C1, targets, options, shard)
        if slope is not None:
            logits_CV.mul_(slope)
    return losses_C1[:, 0]


def torch_scale_(gradient: Tensor, factor_1: Tensor) -> None:
    """See `ChunkFunctions`."""
    gradient.mul_(factor_1)


CHUNK_FUNCTIONS["torch"] = lambda: ChunkFunctions(loss_=torch_chunk_loss_, scale_=torch_scale_)


@attrs.frozen(kw_only=True)
class TorchLinearCrossEntropyConfig(LinearCrossEntropyConfig):
    """Logits of a chunk of tokens in fp32, or fp64 for fp64."""

    kind: ClassVar[str] = "torch"
    priority: ClassVar[int | None] = 0
    capabilities: ClassVar[LossCapabilities] = LossCapabilities()

    def build(self) -> LinearCrossEntropy:
        """Make the backend."""
        return ChunkedLinearCrossEntropy(functions="torch")


linear_cross_entropy_backends.register(TorchLinearCrossEntropyConfig)
