"""Rows on their way between ranks, with gradients on the way back.

An exchange is started by one node of the autograd graph and waited for by another. What is computed between the two
runs beside it; and since backward takes the latest node first, its gradient runs beside the exchange of gradients.

Shapes: T tokens here, K experts per token, S rows sent, R rows received, H hidden size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._packed import PackedRows
from ._rows import RowIndex, gather_rows_into, sum_rows


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


def receive(ticket: Tensor, travel: Travel) -> tuple[Tensor, Tensor, Tensor]:
    """Wait for tokens (R, H), probabilities (R, K) and ids (R, K), int32."""
    x_RH, probs_RK, ids_RK = _Receive.apply(ticket, travel)
    return x_RH, probs_RK, ids_RK


def exchange(x: Tensor, route: Route) -> Tensor:
    """All-to-all of rows; the gradient goes the way back."""
    received: Tensor = _Exchange.apply(x, route)
    return received


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, probs_TK: Tensor, ids_TK: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        tokens = (x_TH, probs_TK, ids_TK.int())
        layout = PackedRows([(x.shape[1], x.dtype) for x in tokens])
        packed = layout.new(travel.sent.rows, x_TH.device)
        for part, x in zip(layout.views(packed), tokens):
            gather_rows_into(part, x, travel.sent)
        travel.start(travel.route, packed, layout)
        return x_TH.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_SH, probs_SK = ctx.travel.finish()
        return sum_rows(x_SH, ctx.travel.sent), sum_rows(probs_SK, ctx.travel.sent), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, travel: Travel) -> tuple[Tensor, Tensor, Tensor]:
        ctx.travel = travel
        ctx.save_for_backward(ticket)
        x_RH, probs_RK, ids_RK = travel.finish()
        ctx.mark_non_differentiable(ids_RK)
        return x_RH, probs_RK, ids_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor, grad_probs_RK: Tensor, _: Tensor) -> tuple[Tensor, None]:
        travel: Travel = ctx.travel
        gradients = (grad_RH, grad_probs_RK)
        layout = PackedRows([(x.shape[1], x.dtype) for x in gradients])
        packed = layout.new(len(grad_RH), grad_RH.device)
        for part, gradient in zip(layout.views(packed), gradients):
            part.copy_(gradient)
        travel.start(travel.route.back(), packed, layout)
        (ticket,) = ctx.saved_tensors
        return torch.zeros_like(ticket), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _at_once(x, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _at_once(grad, ctx.route.back()), None


def _at_once(x: Tensor, route: Route) -> Tensor:
    received, work = route.start(x.contiguous())
    work.wait()
    return received
