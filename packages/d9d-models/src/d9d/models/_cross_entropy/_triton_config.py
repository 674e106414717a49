"""The Triton backend's settings; Triton itself is imported when it is used."""

import importlib.util
from typing import ClassVar

import attrs
import torch

from ._backend import (
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    LinearCrossEntropyNeed,
    LossCapabilities,
    linear_cross_entropy_backends,
)
from ._chunked import CHUNK_FUNCTIONS, ChunkedLinearCrossEntropy
from ._three_products import ChunkFunctions


@attrs.frozen(kw_only=True)
class TritonLinearCrossEntropyConfig(LinearCrossEntropyConfig):
    """Kernels turn the logits of a chunk into losses and, in place, into their gradient; softmax in fp32.

    Logits are rounded to the dtype of the hidden states, as `torch.nn.Linear` rounds them.
    """

    rounds_weight_gradient: bool = False
    """Whether the weight's gradient is summed over chunks in its own dtype: less memory and time, and in bf16 the error
    of so many roundings."""

    kind: ClassVar[str] = "triton"
    priority: ClassVar[int | None] = None
    capabilities: ClassVar[LossCapabilities] = LossCapabilities(
        device_types=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32})
    )

    def build(self) -> LinearCrossEntropy:
        """Make the backend."""
        return ChunkedLinearCrossEntropy(
            functions="triton", rounds_logits=True, rounds_weight_gradient=self.rounds_weight_gradient
        )

    def refusal(self, need: LinearCrossEntropyNeed) -> str | None:
        """Say what is missing."""
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton, which is not installed; choose another backend"
        return super().refusal(need)


def _load() -> ChunkFunctions:
    from ._triton import triton_chunk_loss_, triton_scale_  # noqa: PLC0415 - takes a second

    return ChunkFunctions(loss_=triton_chunk_loss_, scale_=triton_scale_)


CHUNK_FUNCTIONS["triton"] = _load
linear_cross_entropy_backends.register(TritonLinearCrossEntropyConfig)
