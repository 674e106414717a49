"""Which experts a token goes to.

Shapes: T tokens, H hidden size, E experts, K experts per token.
"""

import math

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@attrs.frozen
class Routing:
    """The experts of each token."""

    ids_TK: Tensor
    """int64: global expert ids, best first, no two alike in a row."""

    probs_TK: Tensor
    """Weight of each, fp32 or wider, with gradient."""


class TopKRouter(nn.Module):
    """Softmax over all experts, then the K best.

    In training it counts how many tokens each expert was given in the buffer ``expert_load`` (E,), int64, on this rank
    since it was last zeroed. Under activation checkpointing a token counts once.

    Args:
        hidden_size: Size of a token.
        num_experts: Experts in all.
        top_k: Experts per token.
        renormalize: Make the selected probabilities of a token sum to one.

    Raises:
        ValueError: top_k is not within 1 and num_experts.
    """

    expert_load: Tensor

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, renormalize: bool = True) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be within 1 and num_experts = {num_experts!r}, found {top_k!r}")
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.renormalize = renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("expert_load", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight as nn.Linear does, and zero the load."""
        bound = 1 / math.sqrt(self.hidden_size)
        self.weight.uniform_(-bound, bound)
        self.expert_load.zero_()

    def forward(self, x_TH: Tensor) -> Routing:
        """Route each token; equal scores are resolved as torch.topk does."""
        logits_TE = F.linear(x_TH, self.weight)
        scores_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
        probs_TK, ids_TK = scores_TE.topk(self.top_k, dim=-1)
        if self.renormalize:
            probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
        if self.training and not _is_recomputing():
            self._count(ids_TK)
        return Routing(ids_TK, probs_TK)

    @torch.no_grad()
    def _count(self, ids_TK: Tensor) -> None:
        ids = ids_TK.flatten()
        self.expert_load.scatter_add_(0, ids, torch.ones_like(ids))

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"{self.hidden_size}, {self.num_experts}, top_k={self.top_k}, renormalize={self.renormalize}"


def _is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as that of activation checkpointing does.

    torch has no public way to ask; torch.utils.checkpoint itself asks so.
    """
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001
