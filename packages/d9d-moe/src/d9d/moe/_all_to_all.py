"""Dispatch to experts spread over the ranks of a process group.

Shapes: T tokens here, K experts per token, P ranks, E experts of one rank, S rows sent (a token has one row per rank
it goes to), R rows received, N rows for the experts here, H hidden size.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._dispatch import Arrived, Dispatched, Dispatcher, DispatcherConfig, DispatchNeed, dispatchers
from ._rows import RowIndex, gather_rows, group_by_destination, sum_rows


@attrs.frozen
class AllToAllHandle:
    """The way back."""

    sent: RowIndex
    """Tokens here and the rows sent, by rank."""

    local: RowIndex
    """Rows received and the rows of the experts here."""

    send_splits: Sequence[int]
    """Rows sent to each rank."""

    receive_splits: Sequence[int]
    """Rows received from each rank."""


@attrs.frozen
class AllToAllDispatcher:
    """Sends a token once to each rank that holds one of its experts, with its ids and probabilities.

    A result comes back as one partial sum per rank. dispatch waits for the device once, for the split sizes.
    """

    num_experts: int
    """Experts in all, in contiguous blocks over the ranks."""

    group: dist.ProcessGroup
    """Ranks."""

    def __deepcopy__(self, _: object) -> Self:
        """Give itself: it keeps no state, and a group cannot be copied."""
        return self

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Dispatched[AllToAllHandle]:
        """Send tokens and sort what arrives by expert; see Dispatcher."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        experts_here = self.num_experts // ranks
        rank_TP, sends_P2 = _destinations(ids_TK // experts_here, ranks)
        receives_P2 = torch.empty_like(sends_P2)
        dist.all_to_all_single(receives_P2, sends_P2, group=self.group)
        sends, receives = torch.stack([sends_P2, receives_P2]).tolist()
        send_splits = [tokens for tokens, _ in sends]
        receive_splits = [tokens for tokens, _ in receives]

        sent = group_by_destination(rank_TP, ranks, rows=sum(send_splits))
        ids_SK = ids_TK.index_select(0, sent.token_N)
        ids_RK = _exchange(ids_SK, send_splits, receive_splits, self.group)
        probs_RK = _exchange(gather_rows(probs_TK, sent), send_splits, receive_splits, self.group)
        x_RH = _exchange(gather_rows(x_TH, sent), send_splits, receive_splits, self.group)

        id_here_RK = ids_RK - rank * experts_here
        is_here_RK = (id_here_RK >= 0) & (id_here_RK < experts_here)
        local = group_by_destination(
            id_here_RK.where(is_here_RK, experts_here), experts_here, rows=sum(rows for _, rows in receives)
        )
        probs_N = probs_RK.flatten().gather(0, local.slot_N)
        handle = AllToAllHandle(sent, local, send_splits, receive_splits)
        return Dispatched(gather_rows(x_RH, local), probs_N, local.count_D, handle)

    def dispatch_async(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Arrived[AllToAllHandle]:
        """Dispatch; see Dispatcher."""
        return Arrived(self.dispatch(x_TH, ids_TK, probs_TK))

    def combine(self, y_NH: Tensor, handle: AllToAllHandle) -> Tensor:
        """Sum here, send back, sum there; see Dispatcher. Partial sums travel in the dtype of y."""
        partial_RH = sum_rows(y_NH, handle.local)
        partial_SH = _exchange(partial_RH, handle.receive_splits, handle.send_splits, self.group)
        return sum_rows(partial_SH, handle.sent)


@attrs.frozen(kw_only=True)
class AllToAllDispatcherConfig(DispatcherConfig):
    """Experts are spread over a process group of any backend."""

    kind: ClassVar[str] = "all_to_all"
    priority: ClassVar[int | None] = 0

    def refusal(self, need: DispatchNeed) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None

    def build(self, num_experts: int, group: dist.ProcessGroup) -> Dispatcher[AllToAllHandle]:
        """Make the dispatcher."""
        return AllToAllDispatcher(num_experts, group)


dispatchers.register(AllToAllDispatcherConfig)


@torch.no_grad()
def _destinations(rank_TK: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """List each token's ranks once, and count for each rank the tokens and the (token, expert) pairs it gets.

    Returns:
        (T, P), entry p is p if the token goes to rank p, else P; and (P, 2), int64.
    """
    goes_TP = torch.zeros(rank_TK.shape[0], ranks, dtype=torch.bool, device=rank_TK.device)
    goes_TP.scatter_(1, rank_TK, True)  # noqa: FBT003
    pairs_P = torch.zeros(ranks, dtype=torch.int64, device=rank_TK.device)
    pairs_P.scatter_add_(0, rank_TK.flatten(), torch.ones_like(rank_TK.flatten()))
    every_P = torch.arange(ranks, device=rank_TK.device)
    return every_P.where(goes_TP, ranks), torch.stack([goes_TP.sum(0), pairs_P], dim=1)


def _exchange(x: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of rows; the gradient goes the way back."""
    received: Tensor = _Exchange.apply(x, send_splits, receive_splits, group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = send_splits, receive_splits, group
        return _all_to_all_rows(x, send_splits, receive_splits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send_splits, receive_splits, group = ctx.way
        return _all_to_all_rows(grad, receive_splits, send_splits, group), None, None, None


def _all_to_all_rows(
    x: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    received = x.new_empty(sum(receive_splits), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(receive_splits), list(send_splits), group=group)
    return received
