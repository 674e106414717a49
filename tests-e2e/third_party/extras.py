"""What another package adds to d9d, without patching it: one choice of each kind. It is checked by mypy --strict."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from d9d.attn import (
    AttentionBackend,
    AttentionBackendConfig,
    AttentionMask,
    Capabilities,
    Feature,
    attention_backends,
)
from d9d.ckpt import Group, Mapper, TensorSpec
from d9d.loop.track import Number, Tracker, TrackerConfig
from d9d.moe import Arrived, Dispatched, Dispatcher, DispatcherConfig, DispatchNeed, dispatchers
from d9d.parallel.pipeline import OneFOneB, Program, Schedule


@attrs.frozen(kw_only=True)
class Timid(Schedule):
    """1F1B, written by somebody else."""

    kind: ClassVar[str] = "timid"
    stages_per_rank: ClassVar[int] = 1

    def program(self, *, ranks: int, microbatches: int) -> Program:
        """Order the actions."""
        return OneFOneB().program(ranks=ranks, microbatches=microbatches)


def attend_to_itself(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGE: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention with a window of one: each query sees its own key."""
    del k_BTGD, mask, scale, sinks_H, soft_cap, dropout
    return v_BTGE.repeat_interleave(q_BSHD.shape[2] // v_BTGE.shape[2], dim=2)


@attrs.frozen(kw_only=True)
class SelfishConfig(AttentionBackendConfig):
    """The backend `attend_to_itself`."""

    kind: ClassVar[str] = "selfish"
    capabilities: ClassVar[Capabilities] = Capabilities(features=frozenset({Feature.GROUPED_QUERY}))

    def build(self) -> AttentionBackend:
        """Make the backend."""
        return attend_to_itself


attention_backends.register(SelfishConfig)


@attrs.frozen
class DenseDispatcher:
    """Every expert sees every token, with probability 0 where it was not chosen."""

    experts: int

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Dispatched[int]:
        """Repeat the tokens for each expert."""
        tokens = x_TH.shape[0]
        probs_TE = probs_TK.new_zeros(tokens, self.experts).scatter(1, ids_TK, probs_TK)
        counts_E = torch.full((self.experts,), tokens, dtype=torch.int32, device=x_TH.device)
        return Dispatched(x_TH.repeat(self.experts, 1), probs_TE.T.flatten(), counts_E, tokens)

    def dispatch_async(self, x_TH: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Arrived[int]:
        """Dispatch; nothing travels."""
        return Arrived(self.dispatch(x_TH, ids_TK, probs_TK))

    def combine(self, y_NH: Tensor, handle: int) -> Tensor:
        """Sum over experts."""
        return y_NH.view(self.experts, handle, -1).sum(0)


@attrs.frozen(kw_only=True)
class DenseConfig(DispatcherConfig):
    """The dispatcher `DenseDispatcher`."""

    kind: ClassVar[str] = "dense"

    def refusal(self, need: DispatchNeed) -> str | None:
        """Refuse experts of other ranks."""
        return None if need.ranks == 1 else f"has all experts on one rank, not on {need.ranks!r}; use 'all_to_all'"

    def build(self, num_experts: int, group: dist.ProcessGroup) -> Dispatcher[Any]:
        """Make the dispatcher."""
        del group
        return DenseDispatcher(num_experts)


dispatchers.register(DenseConfig)


@attrs.frozen
class Negate(Mapper):
    """A leaf of the state graph: one tensor, its sign changed."""

    name: str

    def bind(self, names: Collection[str]) -> Sequence[Group]:
        """Take the one name."""
        return [Group([self.name], [self.name], self)] if self.name in names else []

    def infer(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Change no spec."""
        return specs

    def apply(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Change the sign."""
        return {name: -tensor for name, tensor in tensors.items()}

    def inverse(self) -> Mapper:
        """Itself."""
        return self


LOGGED: list[tuple[int, Mapping[str, Number]]] = []


class ListTracker(Tracker):
    """Keeps numbers in memory."""

    def log(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Keep them."""
        LOGGED.append((step, metrics))


@attrs.frozen(kw_only=True)
class ListConfig(TrackerConfig):
    """The tracker `ListTracker`."""

    kind: ClassVar[str] = "list"

    def open(self, directory: Path, *, done: int, steps: int) -> Tracker:
        """Open it."""
        del directory, done, steps
        return ListTracker()
