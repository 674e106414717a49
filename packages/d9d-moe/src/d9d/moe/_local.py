"""Dispatch to experts that are all on this rank.

Shapes as in Dispatcher.
"""

from typing import ClassVar

import attrs
import torch.distributed as dist
from torch import Tensor

from ._dispatch import Arrived, Dispatched, Dispatcher, DispatcherConfig, DispatchNeed, dispatchers
from ._rows import RowIndex, gather_rows, group_by_destination, sum_rows


@attrs.frozen
class LocalDispatcher:
    """Sorts by expert; never waits for the device."""

    num_experts: int
    """Experts."""

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Dispatched[RowIndex]:
        """Sort tokens by expert; see Dispatcher."""
        index = group_by_destination(ids_TK, self.num_experts, rows=ids_TK.numel())
        probs_N = probs_TK.flatten().gather(0, index.slot_N)
        return Dispatched(gather_rows(x_TH, index), probs_N, index.count_D, index)

    def dispatch_async(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Arrived[RowIndex]:
        """Dispatch: nothing travels; see Dispatcher."""
        return Arrived(self.dispatch(x_TH, ids_TK, probs_TK))

    def combine(self, y_NH: Tensor, handle: RowIndex) -> Tensor:
        """Sum the rows of each token; see Dispatcher."""
        return sum_rows(y_NH, handle)


@attrs.frozen(kw_only=True)
class LocalDispatcherConfig(DispatcherConfig):
    """All experts are on this rank."""

    kind: ClassVar[str] = "local"
    priority: ClassVar[int | None] = 10

    def refusal(self, need: DispatchNeed) -> str | None:
        """Refuse experts of other ranks."""
        if need.ranks > 1:
            return f"does not reach experts of other ranks, and they are spread over {need.ranks!r}; use 'all_to_all'"
        return None

    def build(self, num_experts: int, group: dist.ProcessGroup) -> Dispatcher[RowIndex]:  # noqa: ARG002
        """Make the dispatcher."""
        return LocalDispatcher(num_experts)


dispatchers.register(LocalDispatcherConfig)
