"""Mixture of experts as a feed-forward layer.

Shapes: T tokens, H hidden size, K experts per token, N rows.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ._autocast import cast_by_autocast
from ._dispatch import Dispatcher, DispatcherConfig, DispatchNeed, dispatchers
from ._experts import GroupedSwiGLU
from ._local import LocalDispatcher
from ._router import TopKRouter
from ._sequences import Sequences
from ._tokens import check_tokens


class MoELayer(nn.Module):
    """Route, dispatch, transform, combine. All experts are on this rank until ``set_expert_group`` says otherwise.

    Args:
        router: Chooses the experts.
        experts: All of them.
        shared: An expert that sees every token, as `SwiGLU`; it works while tokens travel.
        shared_gate: Whether a sigmoid of the token, ``shared_gate`` (1, H), weighs the shared expert (Qwen2-MoE).

    Raises:
        ValueError: Router and experts differ in the number of experts, or there is a gate and nothing to weigh.
    """

    def __init__(
        self, router: TopKRouter, experts: GroupedSwiGLU, *, shared: nn.Module | None = None, shared_gate: bool = False
    ) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"the router knows {router.num_experts!r} experts and there are {experts.num_experts!r}; "
                "give both the same number"
            )
        if shared_gate and shared is None:
            raise ValueError("shared_gate=True weighs a shared expert, and there is none; give shared")
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = nn.Linear(router.hidden_size, 1, bias=False) if shared_gate else None
        self.dispatcher: Dispatcher[Any] = LocalDispatcher(router.num_experts)

    @property
    def num_experts(self) -> int:
        """Experts over all ranks."""
        return self.router.num_experts

    @property
    def expert_load(self) -> Tensor:
        """int64, (num_experts,): tokens that this rank sent to each expert in training since it was last zeroed."""
        return self.router.expert_load

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Give the parameters whose first dim is the expert."""
        return self.experts.parameters()

    def set_expert_group(self, group: dist.ProcessGroup, *, dispatcher: DispatcherConfig | str | None = None) -> None:
        """Spread the experts over a group: its rank r of P holds experts r·E/P to (r+1)·E/P − 1.

        From now on the weights of ``experts`` must be this rank's block; replacing them is the caller's part.

        Args:
            group: Ranks that exchange tokens; each calls the layer equally often, with or without tokens.
            dispatcher: Dispatcher or its kind; None leaves it to D9D_DISPATCHER, else to the automatic choice.

        Raises:
            ValueError: The experts do not divide over the ranks, or the dispatcher asked for cannot do it.
        """
        ranks = dist.get_world_size(group)
        if self.num_experts % ranks:
            raise ValueError(
                f"{self.num_experts!r} experts do not divide over {ranks!r} expert-parallel ranks; "
                "use a degree that divides the number of experts"
            )
        choice = dispatchers.choose(dispatcher, DispatchNeed(ranks=ranks))
        self.dispatcher = choice.config.build(self.num_experts, group)

    def set_sequence_group(self, group: dist.ProcessGroup | None) -> None:
        """Say which ranks hold other tokens of the same sequences; see `TopKRouter.set_sequence_group`."""
        self.router.set_sequence_group(group)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        sequences: Sequences | None = None,
        ids_TK: Tensor | None = None,
    ) -> Tensor:
        """Transform x of shape (..., hidden_size), token by token.

        Args:
            x: T tokens in all.
            mask: bool, one for each token; False is padding: whatever it holds, the shared expert sees zeros in its
                place and no other expert sees it, it counts in no load and no loss, and gets zeros from the experts.
            sequences: For balance losses; None is a sequence for each index of all dims before the last two.
            ids_TK: Experts to take instead of those that the router would select; see `TopKRouter.forward`.

        Raises:
            ValueError: What is given does not fit; see `TopKRouter.forward`, and `GroupedSwiGLU.forward`.
        """
        check_tokens(x, mask, self.router.hidden_size)
        tokens = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
        routing = self.router(tokens, mask=mask, sequences=sequences, ids_TK=ids_TK)
        x_TH = cast_by_autocast(tokens).reshape(-1, x.shape[-1])  # rounded before they travel, not after
        pending = self.dispatcher.dispatch_async(x_TH, routing.ids_TK, routing.probs_TK)
        shared = None if self.shared is None else self._share(self.shared, tokens)
        rows = pending.wait()
        y_NH = self.experts(rows.x_NH, rows.probs_N, rows.counts_E)
        y = self.dispatcher.combine(y_NH, rows.handle).view(x.shape)
        return y if shared is None else y + shared

    def _share(self, expert: nn.Module, x: Tensor) -> Tensor:
        shared: Tensor = expert(x)
        return shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared
