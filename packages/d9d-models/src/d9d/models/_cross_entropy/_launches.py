"""Launches of the loss's Triton kernels, for either way in which logits lie.

Shapes: C tokens, V classes of this rank.
"""

import abc
from typing import Any

import attrs
import torch
from torch import Tensor

from ._kernel import column_gradient, column_statistics, softmax_rows
from ._options import LossOptions
from ._vocabulary import VocabularyShard

MAX_BLOCK, BLOCK_A_WARP = 32_768, 1024
BLOCK_CLASSES, BLOCK_TOKENS, WARPS, MAX_PARTS = 32, 128, 8, 64


@attrs.frozen
class Chunk(abc.ABC):
    """What kernels are launched on."""

    logits_CV: Tensor
    labels_C: Tensor
    weights_C: Tensor | None
    options: LossOptions
    shard: VocabularyShard | None

    @abc.abstractmethod
    def statistics(self) -> Tensor:
        """(4, C), fp32: maximum, sum of exp(logit − maximum), logit of the label, sum of logits; of this rank."""

    @abc.abstractmethod
    def gradient_(self, log_norm_C: Tensor) -> None:
        """Put the gradient in the logits' place."""

    @property
    def classes(self) -> int:
        """Of all ranks."""
        return self.logits_CV.shape[1] if self.shard is None else self.shard.total

    @property
    def first(self) -> int:
        """The first class of this rank."""
        return 0 if self.shard is None else self.shard.start

    @property
    def soft_cap(self) -> float:
        """A number, as kernels want it, also where there is none."""
        return 1.0 if self.options.soft_cap is None else self.options.soft_cap


class Rows(Chunk):
    """Logits of a token lie side by side."""

    def losses_and_gradient_(self) -> Tensor:
        """Both in one kernel."""
        losses_C = self._new()
        self._launch(losses_C, losses_C, losses_C, make_statistics=True, make_gradient=True)
        return losses_C

    def statistics(self) -> Tensor:
        statistics_4C = self._new(4)
        self._launch(statistics_4C, statistics_4C, statistics_4C, make_statistics=True, make_gradient=False)
        return statistics_4C

    def gradient_(self, log_norm_C: Tensor) -> None:
        self._launch(log_norm_C, log_norm_C, log_norm_C, make_statistics=False, make_gradient=True)

    def _new(self, *shape: int) -> Tensor:
        return self.logits_CV.new_empty((*shape, len(self.logits_CV)), dtype=torch.float32)

    def _launch(
        self, statistics_4C: Tensor, log_norm_C: Tensor, losses_C: Tensor, *, make_statistics: bool, make_gradient: bool
    ) -> None:
        """What the kernel does not touch may be anything."""
        rows, columns = self.logits_CV.shape
        block = min(MAX_BLOCK, 1 << max(4, (columns - 1).bit_length()))  # a power of 2
        kernel: Any = softmax_rows[(rows,)]
        kernel(
            self.logits_CV,
            self.labels_C,
            losses_C if self.weights_C is None else self.weights_C,
            statistics_4C,
            log_norm_C,
            losses_C,
            self.logits_CV.stride(0),
            rows,
            self.classes,
            self.first,
            self.options.ignore_index,
            self.options.label_smoothing,
            self.options.z_loss,
            self.soft_cap,
            COLUMNS=columns,
            HAS_WEIGHTS=self.weights_C is not None,
            HAS_CAP=self.options.soft_cap is not None,
            HAS_SMOOTHING=self.options.label_smoothing > 0,
            STATISTICS=make_statistics,
            GRADIENT=make_gradient,
            BLOCK=block,
            num_warps=max(1, block // BLOCK_A_WARP),
        )


class Columns(Chunk):
    """Logits of a class lie side by side."""

    def statistics(self) -> Tensor:
        tokens, columns = self.logits_CV.shape
        blocks = -(-columns // BLOCK_CLASSES)
        parts = max(1, min(MAX_PARTS, blocks))
        statistics = self.logits_CV.new_empty((4, parts, tokens), dtype=torch.float32)
        kernel: Any = column_statistics[(-(-tokens // BLOCK_TOKENS), parts)]
        kernel(
            self.logits_CV,
            self.labels_C,
            statistics,
            self.logits_CV.stride(1),
            tokens,
            self.first,
            self.options.ignore_index,
            self.soft_cap,
            CLASSES=columns,
            STEPS=-(-blocks // parts),
            HAS_CAP=self.options.soft_cap is not None,
            HAS_SMOOTHING=self.options.label_smoothing > 0,
            BLOCK_CLASSES=BLOCK_CLASSES,
            BLOCK_TOKENS=BLOCK_TOKENS,
            num_warps=WARPS,
        )
        top = statistics[0].amax(0)
        statistics[1].mul_((statistics[0] - top).exp_())
        return torch.cat((top[None], statistics[1:].sum(1)))

    def gradient_(self, log_norm_C: Tensor) -> None:
        tokens, columns = self.logits_CV.shape
        programs = -(-tokens // BLOCK_TOKENS) * -(-columns // BLOCK_CLASSES)
        if not programs:
            return
        kernel: Any = column_gradient[(programs,)]
        kernel(
            self.logits_CV,
            self.labels_C,
            log_norm_C if self.weights_C is None else self.weights_C,
            log_norm_C,
            self.logits_CV.stride(1),
            tokens,
            self.classes,
            self.first,
            self.options.ignore_index,
            self.options.label_smoothing,
            self.options.z_loss,
            self.soft_cap,
            CLASSES=columns,
            HAS_WEIGHTS=self.weights_C is not None,
            HAS_CAP=self.options.soft_cap is not None,
            BLOCK_CLASSES=BLOCK_CLASSES,
            BLOCK_TOKENS=BLOCK_TOKENS,
            num_warps=WARPS,
        )
