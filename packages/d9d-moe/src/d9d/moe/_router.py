"""Which experts a token goes to.

Shapes: T tokens, H hidden size, E experts, K experts per token.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ._autocast import without_autocast
from ._auxiliary import attach_auxiliary
from ._count import count_tokens
from ._losses import AuxiliaryLoss, RoutedTokens
from ._scoring import Scoring, SoftmaxScoring
from ._selection import HighestScores, Selection
from ._sequences import Sequences
from ._tokens import check_tokens

_SOFTMAX = SoftmaxScoring()
_HIGHEST = HighestScores()


class Routing(NamedTuple):
    """The experts of each token."""

    ids_TK: Tensor
    """int64: global expert ids, no two alike in a row; the number of experts stands for none, in rows of padding."""

    probs_TK: Tensor
    """Weight of each, fp32 or wider, with gradient."""


class Tape(Protocol):
    """Sees the experts that a router chose, and may give others; see `record_routing` and `replay_routing`."""

    def __call__(self, ids_TK: Tensor) -> Tensor:
        """Give the experts to take."""
        ...


class TopKRouter(nn.Module):
    """A linear layer scores the experts for each token; some of them are selected and weighed by their scores.

    In training it counts how many tokens each expert was given in the buffer ``expert_load`` (E,), int64, on this rank
    since it was last zeroed. Under activation checkpointing a token counts once.

    With ``expert_bias`` the buffer of that name (E,), fp32 or wider whatever the module is built in or cast to, is
    added to scores when experts are selected, and not when they are weighed; `update_expert_bias` moves it.

    Args:
        hidden_size: Size of a token.
        num_experts: Experts in all.
        top_k: Experts per token.
        scoring: How logits are read.
        selection: How experts are selected by their scores.
        scale: Factor on the weights.
        bias: Whether the linear layer has a bias.
        expert_bias: Whether there is a bias that selects only.
        losses: Auxiliary losses; in training their gradient is added when that of the weights is computed, see
            `attach_auxiliary`.
        logits_in_fp32: Compute logits in fp32 whatever the dtype of tokens and weight, as DeepSeek does.

    Raises:
        ValueError: top_k is not within 1 and num_experts, or the selection cannot select so many.
    """

    expert_load: Tensor
    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Scoring = _SOFTMAX,
        selection: Selection = _HIGHEST,
        scale: float = 1.0,
        bias: bool = False,
        expert_bias: bool = False,
        losses: Sequence[AuxiliaryLoss] = (),
        logits_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be within 1 and num_experts = {num_experts!r}, found {top_k!r}")
        selection.check(num_experts, top_k)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.scoring = scoring
        self.selection = selection
        self.scale = scale
        self.losses = tuple(losses)
        self.logits_in_fp32 = logits_in_fp32
        self.sequence_group: dist.ProcessGroup | None = None
        self.tape: Tape | None = None
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.register_buffer("expert_load", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("expert_bias", torch.empty(num_experts, dtype=wide) if expert_bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight and bias as nn.Linear does, and zero the load and the bias that selects."""
        bound = 1 / math.sqrt(self.hidden_size)
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)
        self.expert_load.zero_()
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def set_sequence_group(self, group: dist.ProcessGroup | None) -> None:
        """Say which ranks hold other tokens of the same sequences, as under context parallelism.

        Balance losses then see whole sequences, by one small collective a forward: every rank of the group calls the
        router equally often, with the same sequences in the same order.
        """
        self.sequence_group = group

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        sequences: Sequences | None = None,
        ids_TK: Tensor | None = None,
    ) -> Routing:
        """Route each token.

        Args:
            x: (..., hidden_size), T tokens in all.
            mask: bool, one for each token; False is padding: its experts are ``num_experts``, which is none, and their
                weights 0; it counts in no load and no loss. It must be finite.
            sequences: For balance losses; None is a sequence for each index of all dims before the last two.
            ids_TK: Experts to take instead of the selected ones, int64, no two alike in a row; of padding, any.

        Raises:
            ValueError: x is not of ``hidden_size``; the mask is not bool, or not one of the tokens; ``ids_TK``, or what
                the tape gives, is not int64 (T, K).
        """
        check_tokens(x, mask, self.hidden_size)
        logits_TE = self._logits(x.reshape(-1, self.hidden_size))
        mask_T = None if mask is None else mask.flatten()
        scores_TE = self.scoring.scores(logits_TE)
        ids_TK = self._select(scores_TE.detach(), ids_TK)
        if mask_T is not None:  # what is given may be the ids of a Routing, which are out of range here
            ids_TK = ids_TK.masked_fill(~mask_T[:, None], 0)
        probs_TK = self.scoring.weights(scores_TE.gather(1, ids_TK)) * self.scale
        if mask_T is not None:
            probs_TK = probs_TK.masked_fill(~mask_T[:, None], 0.0)
        if self.training:
            count_tokens(self.expert_load, ids_TK, mask_T)
            if self.losses and torch.is_grad_enabled():
                sequences = sequences or Sequences(_count_sequences(x))
                tokens = RoutedTokens(logits_TE, ids_TK, self.scoring, sequences, mask_T, self.sequence_group)
                for loss in self.losses:
                    probs_TK = attach_auxiliary(probs_TK, loss(tokens))
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T[:, None], self.num_experts)
        return Routing(ids_TK, probs_TK)

    def _logits(self, x_TH: Tensor) -> Tensor:
        if self.logits_in_fp32:
            wide = torch.promote_types(x_TH.dtype, torch.float32)
            bias_E = None if self.bias is None else self.bias.to(wide)
            with without_autocast(x_TH):
                return F.linear(x_TH.to(wide), self.weight.to(wide), bias_E)
        logits_TE = F.linear(x_TH, self.weight, self.bias)
        return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))

    @torch.no_grad()
    def _select(self, scores_TE: Tensor, ids_TK: Tensor | None) -> Tensor:
        if ids_TK is None:
            biased_TE = scores_TE if self.expert_bias is None else scores_TE + self.expert_bias
            ids_TK = self.selection(biased_TE, self.top_k)
        if self.tape is not None:
            ids_TK = self.tape(ids_TK)
        if ids_TK.shape != (shape := (scores_TE.shape[0], self.top_k)):
            raise ValueError(f"experts for {shape!r} tokens and choices are needed, found {tuple(ids_TK.shape)!r}")
        if ids_TK.dtype != torch.int64:
            raise ValueError(f"ids of experts must be torch.int64, found {ids_TK.dtype!r}; convert them by .long()")
        return ids_TK

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Move and cast as any module, but keep the bias that selects in fp32: its steps vanish in bf16.

        The load, which no checkpoint holds, starts at zero when it leaves the meta device.
        """
        before, load_was_meta = self.expert_bias, self.expert_load.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.expert_bias
        if before is not None and after is not None and after.dtype.itemsize < torch.float32.itemsize:
            kept = after if before.is_meta else before  # what was on meta has no values to keep
            self.expert_bias = kept.to(after.device, torch.float32)
        if load_was_meta and not self.expert_load.is_meta:
            self.expert_load.zero_()
        return self

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        settings = {
            "scoring": self.scoring, "selection": self.selection, "scale": self.scale, "bias": self.bias is not None,
            "expert_bias": self.expert_bias is not None, "losses": self.losses, "logits_in_fp32": self.logits_in_fp32,
        }  # fmt: skip
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{self.hidden_size}, {self.num_experts}, top_k={self.top_k}, {shown}"


def _count_sequences(x: Tensor) -> int:
    return max(1, math.prod(x.shape[:-2]))
