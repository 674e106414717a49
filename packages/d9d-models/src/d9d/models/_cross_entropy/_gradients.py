"""Gradients of hidden states, weight and bias, chunk by chunk of tokens.

Where the sum of the weight's gradient has room for the logits of all tokens, they may lie there, and then all tokens
are one chunk: H numbers a class in fp32 are 2·H logits a class in bf16. As the gradient replaces them class by class,
those of a class lie side by side.

Shapes: N tokens, C of them in a chunk, H hidden size, V classes of this rank.
"""

import attrs
import torch
from torch import Tensor

from ._chunk_sizes import chunks, even_chunk
from ._products import add_product_, multiply, wide
from ._vocabulary import VocabularyShard


@attrs.frozen
class Gradients:
    """Those that are wanted; complete after the last chunk and `finished`."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def new(
        cls,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        *,
        needs: tuple[bool, bool, bool],
        shard: VocabularyShard | None,
        weight_dtype: torch.dtype,
    ) -> "Gradients":
        """Memory; ``needs`` says what for, ``weight_dtype`` is that in which weight and bias sum up the chunks."""
        needs_hidden, needs_weight, needs_bias = needs
        # Partial sums of ranks are added up before they are rounded.
        hidden_dtype = hidden_NH.dtype if shard is None else wide(hidden_NH.dtype)
        of_weight = torch.empty_like if len(hidden_NH) else torch.zeros_like  # the first chunk does not add
        return cls(
            torch.empty_like(hidden_NH, dtype=hidden_dtype) if needs_hidden else None,
            of_weight(weight_VH, dtype=weight_dtype) if needs_weight else None,
            torch.zeros_like(weight_VH[:, 0], dtype=weight_dtype) if needs_bias else None,
        )

    def memory_for_logits(self, tokens: int, dtype: torch.dtype) -> Tensor | None:
        """(tokens, V) in the memory of the weight's gradient, for `replace_`; None where that is too small."""
        total = self.weight_VH
        if total is None or total.shape[1] * total.itemsize < tokens * dtype.itemsize:
            return None
        if total.stride() != (total.shape[1], 1):  # a weight of no class may be contiguous, and in gaps
            return None
        return total.view(dtype)[:, :tokens].T

    def add_(self, rows: slice, of_logits_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
        """Add what a chunk gives, of the gradient of its logits; the weight has the dtype of the hidden states."""
        of_logits_CV = self._without_weight(rows, of_logits_CV, hidden_CH, weight_VH)
        if self.weight_VH is None:
            return
        if rows.start == 0:
            multiply(of_logits_CV.T, hidden_CH, self.weight_VH)
        else:
            add_product_(self.weight_VH, of_logits_CV.T, hidden_CH)

    def replace_(self, of_logits_NV: Tensor, hidden_NH: Tensor, weight_VH: Tensor, max_bytes: int) -> None:
        """As `add_` of all tokens, where logits lie in `memory_for_logits`; ``max_bytes`` may be held besides."""
        total = self.weight_VH
        assert total is not None
        self._without_weight(slice(None), of_logits_NV, hidden_NH, weight_VH)
        size = even_chunk(len(total), max(1, max_bytes // (total.shape[1] * total.itemsize)))
        made = total.new_empty((size, total.shape[1]))
        for classes in chunks(len(total), size):
            of_logits = of_logits_NV.T[classes]
            total[classes] = multiply(of_logits, hidden_NH, made[: len(of_logits)])

    def _without_weight(self, rows: slice, of_logits_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """Add to the other gradients; returns the factor of products."""
        if self.bias_V is not None:
            self.bias_V.add_(of_logits_CV.sum(0, dtype=wide(hidden_CH.dtype)))
        of_logits_CV = of_logits_CV.to(hidden_CH.dtype)
        if self.hidden_NH is not None:
            multiply(of_logits_CV, weight_VH, self.hidden_NH[rows])
        return of_logits_CV

    def finished(self, hidden_dtype: torch.dtype, shard: VocabularyShard | None) -> "Gradients":
        """After the last chunk: with what the other ranks' classes give to the hidden states."""
        if self.hidden_NH is None or shard is None:
            return self
        shard.sum_(self.hidden_NH)
        return attrs.evolve(self, hidden_NH=self.hidden_NH.to(hidden_dtype))

    def or_empty(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As operators return them: an empty tensor for what is not wanted."""
        of_hidden, of_weight, of_bias = (
            like.new_empty(0) if x is None else x for x in (self.hidden_NH, self.weight_VH, self.bias_V)
        )
        return of_hidden, of_weight, of_bias


def dtype_for(operand: Tensor, summed: torch.dtype) -> torch.dtype:
    """Of the gradient that an operand gets: that in which it was summed where ``grad_dtype`` takes it."""
    if torch.compiler.is_compiling() or not operand.is_leaf:
        return operand.dtype
    return summed if operand.grad_dtype in {None, summed} else operand.dtype
