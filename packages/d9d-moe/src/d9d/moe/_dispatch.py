"""What a dispatcher is, and how one is chosen.

Shapes: T tokens, H hidden size, K experts per token, N rows, E experts of this rank.
"""

import abc
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import attrs
import torch.distributed as dist
from torch import Tensor

from ._registry import BackendConfig, Registry

HandleT = TypeVar("HandleT")


class Dispatched(NamedTuple, Generic[HandleT]):
    """Rows for the experts of this rank."""

    x_NH: Tensor
    """Rows sorted by expert, with gradient."""

    probs_N: Tensor
    """Routing probability of each, in the dtype it was given in, with gradient."""

    counts_E: Tensor
    """int32, rows of each expert, on the device; sums to N."""

    handle: HandleT
    """What combine needs to bring the rows back."""


class PendingDispatch(Protocol[HandleT]):
    """Tokens on their way."""

    def wait(self) -> Dispatched[HandleT]:
        """Give the rows once they are here; to be called once."""
        ...


class Arrived(NamedTuple, Generic[HandleT]):
    """A pending dispatch that is over."""

    dispatched: Dispatched[HandleT]

    def wait(self) -> Dispatched[HandleT]:
        """Give the rows."""
        return self.dispatched


class Dispatcher(Protocol[HandleT]):
    """Brings tokens to their experts and results back; it keeps no state, so calls may nest and interleave.

    Every rank of the group calls dispatch, combine and the backward of both, with or without tokens, in one order.

    The id ``num_experts`` says that a slot has no expert, as those of padding; its probability must be 0 and its token
    finite, as it may pass through an expert as zeros.
    """

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Dispatched[HandleT]:
        """Send each token to its experts, by their global ids (no two alike in a row)."""
        ...

    def dispatch_async(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> PendingDispatch[HandleT]:
        """Dispatch, without waiting for what travels: work that is started before ``wait`` runs beside it.

        In backward, the gradient of that work runs beside the way back of the rows' gradient.
        """
        ...

    def combine(self, y_NH: Tensor, handle: HandleT) -> Tensor:
        """Return (T, H): the plain sum of each token's rows, accumulated in fp32 or wider."""
        ...


@attrs.frozen(kw_only=True)
class DispatchNeed:
    """What is asked of a dispatcher."""

    ranks: int
    """Ranks over which the experts are spread."""


class DispatcherConfig(BackendConfig[DispatchNeed]):
    """Base of the dispatchers' settings; register a subclass with ``dispatchers.register``."""

    @abc.abstractmethod
    def build(self, num_experts: int, group: dist.ProcessGroup) -> Dispatcher[Any]:
        """Make the dispatcher for all experts, spread in contiguous blocks over the group."""


dispatchers: Registry[DispatcherConfig, DispatchNeed] = Registry("dispatcher", env="D9D_DISPATCHER")
"""Dispatchers by kind; ``choose`` picks one."""
