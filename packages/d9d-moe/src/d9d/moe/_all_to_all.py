"""Dispatch to experts spread over the ranks of a process group.

Shapes: T tokens here, K experts per token, P ranks, E experts of one rank, S rows sent (a token has one row per rank
it goes to), R rows received, N rows for the experts here, H hidden size.
"""

from typing import ClassVar, NamedTuple, Self

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ._dispatch import Dispatched, Dispatcher, DispatcherConfig, DispatchNeed, dispatchers
from ._rows import RowIndex, group_operator, ranks_of_tokens
from ._travel import Route, Travel, bring_back, receive, send


class AllToAllHandle(NamedTuple):
    """The way back."""

    sent: RowIndex
    """Tokens here and the rows sent, by rank."""

    local: RowIndex
    """Rows received and the rows of the experts here."""

    route: Route
    """Rows sent to each rank and received from it."""


class _PendingAllToAll(NamedTuple):
    """Tokens on their way; see PendingDispatch."""

    travel: Travel
    ticket: Tensor
    experts: range
    rows: int

    def wait(self) -> Dispatched[AllToAllHandle]:
        """Sort what has arrived by expert."""
        x_NH, probs_N, local = receive(self.ticket, self.travel, self.experts, rows=self.rows)
        return Dispatched(x_NH, probs_N, local.count_D, AllToAllHandle(self.travel.sent, local, self.travel.route))


@attrs.frozen
class AllToAllDispatcher:
    """Sends a token once to each rank that holds one of its experts, its ids and probabilities in the same message.

    A result comes back as one partial sum per rank. Where the tokens or probabilities of any rank need a gradient, the
    rows of every rank do. dispatch waits for the device once, for the split sizes.
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
        return self.dispatch_async(x_TH, ids_TK, probs_TK).wait()

    def dispatch_async(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> _PendingAllToAll:
        """Send tokens; see Dispatcher. It has waited for the split sizes when it returns.

        Raises:
            RuntimeError: Gradients are off on this rank, and tokens of others need one.
        """
        rank, ranks = self.group.rank(), self.group.size()
        size = self.num_experts // ranks
        rank_TP, sends_P2 = ranks_of_tokens(ids_TK, size, ranks)
        needs_gradient = torch.is_grad_enabled() and (x_TH.requires_grad or probs_TK.requires_grad)
        if not needs_gradient:  # told along with the counts: backward exchanges on all ranks or on none
            sends_P2.bitwise_not_()
        receives_P2 = torch.empty_like(sends_P2)
        counting = dist.all_to_all_single(receives_P2, sends_P2, group=self.group, async_op=True)
        row_TP, count_P = group_operator(rank_TP, ranks, 0)
        assert counting is not None
        counting.wait()
        sends, receives = torch.stack([sends_P2, receives_P2]).tolist()
        if not needs_gradient and any(tokens >= 0 for tokens, _ in receives):
            x_TH = _requiring_gradient(x_TH)
        route = Route([_count(tokens) for tokens, _ in sends], [_count(tokens) for tokens, _ in receives], self.group)

        travel = Travel(RowIndex(row_TP, count_P, sum(route.sends)), route)
        ticket = send(x_TH, probs_TK, ids_TK, travel)
        experts = range(rank * size, (rank + 1) * size)
        return _PendingAllToAll(travel, ticket, experts, sum(_count(rows) for _, rows in receives))

    def combine(self, y_NH: Tensor, handle: AllToAllHandle) -> Tensor:
        """Sum here, send back, sum there; see Dispatcher. Partial sums travel in the dtype of y."""
        return bring_back(y_NH, handle.local.row_TK, handle.sent.row_TK, handle.route)


def _count(told: int) -> int:
    """A count, or its complement, which says that the rank it is from needs no gradient."""
    return told if told >= 0 else ~told


def _requiring_gradient(x_TH: Tensor) -> Tensor:
    """Give x a gradient that nobody asks for, so that this rank takes part when those of others travel back."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "tokens of other ranks need a gradient and this rank records none: their backward would wait for it; "
            "enable gradients on all ranks of the group or on none"
        )
    return x_TH.detach().requires_grad_()


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
