"""Which experts are taken, given a score for each.

Shapes: T tokens, E experts, K experts per token, G groups, B experts of a group.
"""

import math
from typing import Protocol

import attrs
import torch
from torch import Tensor


class Selection(Protocol):
    """Takes experts by scores, which carry no gradient here."""

    def __call__(self, scores_TE: Tensor, top_k: int) -> Tensor:
        """Give int64 (T, K), no two alike in a row."""
        ...

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise a ValueError if it cannot select so many of so many."""
        ...


@attrs.frozen
class HighestScores:
    """The K highest of all, best first; equal ones as torch.topk resolves them."""

    def __call__(self, scores_TE: Tensor, top_k: int) -> Tensor:
        """See Selection."""
        return scores_TE.topk(top_k, dim=-1).indices

    def check(self, num_experts: int, top_k: int) -> None:
        """Accept any: the router has checked the numbers themselves."""


@attrs.frozen(kw_only=True)
class GroupLimited:
    """The K highest within the best groups of experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    With groups that are nodes, a token travels to few nodes.
    """

    groups: int
    """Groups of equally many adjacent experts."""

    top_groups: int
    """Groups that a token may use."""

    judged_by: int = 2
    """A group is as good as the sum of so many of its highest scores: 2 in DeepSeek-V3, 1 in V2."""

    def __call__(self, scores_TE: Tensor, top_k: int) -> Tensor:
        """See Selection."""
        scores_TGB = scores_TE.unflatten(-1, (self.groups, -1))
        of_group_TG = scores_TGB.topk(self.judged_by, dim=-1).values.sum(-1)
        best_TG = of_group_TG.topk(self.top_groups, dim=-1, sorted=False).indices
        is_open_TG = torch.zeros_like(of_group_TG, dtype=torch.bool).scatter(1, best_TG, True)  # noqa: FBT003
        within_TGB = scores_TGB.masked_fill(~is_open_TG[..., None], -math.inf)
        ids_TK: Tensor = within_TGB.flatten(1).topk(top_k, dim=-1).indices
        return ids_TK

    def check(self, num_experts: int, top_k: int) -> None:
        """See Selection."""
        if self.groups < 1 or num_experts % self.groups:
            raise ValueError(f"groups must divide num_experts = {num_experts!r}, found {self.groups!r}")
        size = num_experts // self.groups
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups must be within 1 and groups = {self.groups!r}, found {self.top_groups!r}")
        if not 1 <= self.judged_by <= size:
            raise ValueError(f"judged_by must be within 1 and the {size} experts of a group, found {self.judged_by!r}")
        if top_k > self.top_groups * size:
            raise ValueError(
                f"{self.top_groups!r} groups of {size} experts have no top_k = {top_k!r}; open more groups"
            )


@attrs.frozen
class ForcedBalance:
    """Experts in turn, whatever their scores: every one gets equally many tokens. For benches, never for training."""

    def __call__(self, scores_TE: Tensor, top_k: int) -> Tensor:
        """See Selection."""
        tokens, experts = scores_TE.shape
        place_TK = torch.arange(tokens * top_k, device=scores_TE.device).view(tokens, top_k)
        ids_TK: Tensor = place_TK % experts
        return ids_TK

    def check(self, num_experts: int, top_k: int) -> None:
        """Accept any: the router has checked the numbers themselves."""
