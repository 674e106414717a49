"""Dispatch to experts that are all on this rank.

Shapes: T tokens, K experts per token, N = T·K rows, H hidden size.
"""

from typing import ClassVar

import attrs
import torch.distributed as dist
from torch import Tensor

from ._dispatch import Arrived, Dispatched, Dispatcher, DispatcherConfig, DispatchNeed, dispatchers
from ._rows import RowIndex, gather_rows_with_probs, group_by_destination, sum_rows


@attrs.frozen
class LocalDispatcher:
    """Sorts by expert; never waits for the device."""

    num_experts: int
    """Experts."""

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Dispatched[RowIndex]:
        """Sort tokens by expert; see Dispatcher."""
        # The host does not know how many slots have no expert: their rows go, with probability 0, to the last one.
        expert_TK = ids_TK.clamp(max=self.num_experts - 1)
        index = group_by_destination(expert_TK, self.num_experts, rows=ids_TK.numel())
        x_NH, probs_N = gather_rows_with_probs(x_TH, probs_TK, index)
        return Dispatched(x_NH, probs_N, index.count_D, index)

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
