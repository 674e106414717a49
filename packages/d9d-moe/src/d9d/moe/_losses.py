"""Auxiliary losses of a router: summed over tokens, never averaged.

Shapes: T tokens, E experts, K experts per token, D sequences.
"""

from typing import NamedTuple, Protocol

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ._scoring import Scoring
from ._sequences import Sequences


class RoutedTokens(NamedTuple):
    """What a router did."""

    logits_TE: Tensor
    """fp32 or wider, with gradient."""

    ids_TK: Tensor
    """int64, the experts taken."""

    scoring: Scoring
    """How logits were read."""

    sequences: Sequences
    """Which tokens belong together."""

    mask_T: Tensor | None = None
    """False is padding, which counts nowhere."""

    sequence_group: dist.ProcessGroup | None = None
    """Ranks that hold other tokens of the same sequences."""


class AuxiliaryLoss(Protocol):
    """A loss on routing."""

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        """Sum over the tokens of this rank: no dims, fp32 or wider. Sums of all ranks and microbatches add up."""
        ...


@attrs.frozen(kw_only=True)
class BalanceLoss:
    """Load balance within each sequence (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20), weighted by its tokens.

    A sequence of L tokens adds ``coefficient · L · Σₑ fₑ · Pₑ``, with ``fₑ = E / (K · L)`` times the tokens that
    expert e was given (after any bias: where tokens really went), and ``Pₑ`` its mean probability. With equal loads
    that is ``coefficient`` for each token. f carries no gradient.

    Sequences are whole in a microbatch, or lie on the ranks of the router's ``sequence_group``: then the sum over
    microbatches and ranks depends on nothing else.
    """

    coefficient: float
    """Weight beside the main loss, per token."""

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        """See AuxiliaryLoss."""
        probabilities_TE = tokens.scoring.probabilities(tokens.logits_TE)
        with torch.no_grad():
            taken_TE = torch.zeros_like(probabilities_TE).scatter(1, tokens.ids_TK, 1.0)
            if tokens.mask_T is not None:
                taken_TE = taken_TE * tokens.mask_T[:, None]
            taken_DE = tokens.sequences.sum(taken_TE)
            if tokens.sequence_group is not None:
                dist.all_reduce(taken_DE, group=tokens.sequence_group)
            # A token takes K experts, so this is K · L; sequences of padding alone have none.
            share_DE = taken_DE / taken_DE.sum(-1, keepdim=True).clamp(min=1.0)
        if tokens.mask_T is not None:
            probabilities_TE = probabilities_TE * tokens.mask_T[:, None]
        mass_DE = tokens.sequences.sum(probabilities_TE)
        return (share_DE * mass_DE).sum() * (self.coefficient * mass_DE.shape[1])


@attrs.frozen(kw_only=True)
class ZLoss:
    """``coefficient · Σ (log Σₑ exp logitₑ)²``, which keeps logits small (ST-MoE, arXiv:2202.08906, equation 5)."""

    coefficient: float
    """Weight beside the main loss, per token."""

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        """See AuxiliaryLoss."""
        squares_T = tokens.logits_TE.logsumexp(-1).square()
        if tokens.mask_T is not None:
            squares_T = squares_T * tokens.mask_T
        return squares_T.sum() * self.coefficient
