"""Rows on their way between ranks, with gradients on the way back.

An exchange is started by one node of the autograd graph and waited for by another. What is computed between the two
runs beside it; and since backward takes the latest node first, its gradient runs beside the exchange of gradients.

Shapes: T tokens here, K experts per token, P ranks, S rows sent, R rows received, N rows of the experts here, H hidden
size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._packed import PackedRows
from ._rows import RowIndex, gather_operator, group_operator, pack_rows, sum_operator, sum_rows_into


class Route(NamedTuple):
    """How many rows go where."""

    sends: Sequence[int]
    """Rows to each rank."""

    receives: Sequence[int]
    """Rows from each rank."""

    group: dist.ProcessGroup
    """Ranks."""

    def back(self) -> "Route":
        """The way back."""
        return Route(self.receives, self.sends, self.group)

    def start(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        """Exchange contiguous rows; what comes may be read once the work is over."""
        received = rows.new_empty(sum(self.receives), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows, list(self.receives), list(self.sends), group=self.group, async_op=True
        )
        assert work is not None
        if torch.is_anomaly_enabled():  # it looks at gradients between the nodes
            work.wait()
        return received, work

    def exchange(self, rows: Tensor) -> Tensor:
        """Exchange contiguous rows and wait."""
        received, work = self.start(rows)
        work.wait()
        return received


@attrs.define
class Travel:
    """One exchange of tokens, shared by the node that starts it and the one that waits."""

    sent: RowIndex
    """Tokens here and the rows sent, by rank."""

    route: Route
    """Where they go."""

    _layout: PackedRows | None = None
    _under_way: tuple[Tensor, dist.Work] | None = None

    def start(self, route: Route, packed: Tensor, layout: PackedRows) -> None:
        """Exchange packed rows."""
        self._layout, self._under_way = layout, route.start(packed)

    def finish(self) -> list[Tensor]:
        """Wait, and give the parts of the rows received."""
        assert self._under_way is not None
        assert self._layout is not None
        received, work = self._under_way
        self._under_way = None
        work.wait()
        return self._layout.views(received)


def send(x_TH: Tensor, probs_TK: Tensor, ids_TK: Tensor, travel: Travel) -> Tensor:
    """Start the exchange of tokens with their probabilities and ids; give the ticket for `receive`."""
    ticket: Tensor = _Send.apply(x_TH, probs_TK, ids_TK, travel)
    return ticket


def receive(ticket: Tensor, travel: Travel, experts: range, *, rows: int) -> tuple[Tensor, Tensor, RowIndex]:
    """Wait for tokens, and sort them by expert.

    Args:
        ticket: Of `send`.
        travel: The same.
        experts: Those of this rank.
        rows: How many there will be for them.

    Returns:
        Rows (N, H), their probabilities (N,), and the index of the rows of tokens received.
    """
    x_NH, probs_N, row_RK, count_E = _Receive.apply(ticket, travel, experts, rows)
    return x_NH, probs_N, RowIndex(row_RK, count_E, rows)


def bring_back(y_NH: Tensor, row_RK: Tensor, row_TP: Tensor, route: Route) -> Tensor:
    """Sum the rows of each token received, send the sums back, and sum those of each token here: (T, H).

    Args:
        y_NH: Rows of the experts here.
        row_RK: Index of them.
        row_TP: Index of the rows that were sent.
        route: The way they came.
    """
    tokens_TH: Tensor = _BringBack.apply(y_NH, row_RK, row_TP, route)
    return tokens_TH


# Nodes of our own around operators: they have one gradient each, and one node costs less time on the host than several.


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, probs_TK: Tensor, ids_TK: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        size, slots = x_TH.shape[1], ids_TK.shape[1]
        layout = PackedRows([(size, x_TH.dtype), (slots, probs_TK.dtype), (slots, torch.int32)])
        packed = layout.new(travel.sent.rows, x_TH.device)
        x_SH, probs_SK, ids_SK = layout.views(packed)
        pack_rows(x_TH, probs_TK, ids_TK, travel.sent.row_TK, into=(x_SH, probs_SK, ids_SK))
        travel.start(travel.route, packed, layout)
        return x_TH.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        row_TP = ctx.travel.sent.row_TK
        grad_TH, grad_TK = (sum_operator(x, None, None, row_TP)[0] for x in ctx.travel.finish())
        return grad_TH, grad_TK, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, travel: Travel, experts: range, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_RH, probs_RK, ids_RK = travel.finish()
        row_RK, count_E = group_operator(ids_RK, len(experts), experts.start)
        x_NH, probs_N = gather_operator(x_RH, probs_RK, row_RK, rows)
        ctx.travel = travel
        ctx.save_for_backward(ticket, row_RK)
        ctx.mark_non_differentiable(row_RK, count_E)
        return x_NH, probs_N, row_RK, count_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor, grad_N: Tensor, *_: None) -> tuple[Tensor, None, None, None]:
        travel: Travel = ctx.travel
        ticket, row_RK = ctx.saved_tensors
        layout = PackedRows([(grad_NH.shape[1], grad_NH.dtype), (row_RK.shape[1], grad_N.dtype)])
        packed = layout.new(row_RK.shape[0], grad_NH.device)
        grad_RH, grad_RK = layout.views(packed)
        sum_rows_into(grad_NH, grad_N, row_RK, into=(grad_RH, grad_RK))
        travel.start(travel.route.back(), packed, layout)
        return ticket.detach(), None, None, None


class _BringBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, row_RK: Tensor, row_TP: Tensor, route: Route) -> Tensor:
        ctx.rows, ctx.route = y_NH.shape[0], route
        ctx.save_for_backward(row_RK, row_TP)
        partial_RH = sum_operator(y_NH, None, None, row_RK)[0]
        return sum_operator(route.back().exchange(partial_RH), None, None, row_TP)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None, None]:
        row_RK, row_TP = ctx.saved_tensors
        route: Route = ctx.route
        grad_SH = gather_operator(grad_TH, None, row_TP, sum(route.sends))[0]
        return gather_operator(route.exchange(grad_SH), None, row_RK, ctx.rows)[0], None, None, None
