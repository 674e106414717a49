"""Mixture of experts as a feed-forward layer."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ._dispatch import Dispatcher, DispatcherConfig, DispatchNeed, dispatchers
from ._experts import GroupedSwiGLU
from ._local import LocalDispatcher
from ._router import TopKRouter


class MoELayer(nn.Module):
    """Route, dispatch, transform, combine. All experts are on this rank until ``set_expert_group`` says otherwise.

    Args:
        router: Chooses the experts.
        experts: All of them.

    Raises:
        ValueError: Router and experts differ in the number of experts.
    """

    def __init__(self, router: TopKRouter, experts: GroupedSwiGLU) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"the router knows {router.num_experts!r} experts and there are {experts.num_experts!r}; "
                "give both the same number"
            )
        self.router = router
        self.experts = experts
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

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (..., hidden_size), token by token."""
        x_TH = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TH)
        rows = self.dispatcher.dispatch(x_TH, routing.ids_TK, routing.probs_TK)
        y_NH = self.experts(rows.x_NH, rows.probs_N, rows.counts_E)
        return self.dispatcher.combine(y_NH, rows.handle).view(x.shape)
