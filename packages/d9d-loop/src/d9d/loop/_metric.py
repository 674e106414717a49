"""A metric that most tasks can do with."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class WeightedMean:
    """A sum divided by a weight, both gathered over microbatches and ranks; NaN where the weight is 0."""

    def __init__(self) -> None:
        self._gathered = torch.zeros(2, dtype=torch.float64)

    def update(self, sum: Tensor, weight: Tensor) -> None:  # noqa: A002 (as LossSum names it)
        """Add 0-dim tensors; the device is not waited for."""
        self._gathered = self._gathered.to(sum.device) + torch.stack([sum.detach().double(), weight.detach().double()])

    def compute(self, total: Callable[[Tensor], Tensor]) -> float:
        """See `d9d.loop.Metric.compute`."""
        value, weight = total(self._gathered).tolist()
        return value / weight if weight else float("nan")

    def reset(self) -> None:
        """See `d9d.loop.Metric.reset`."""
        self._gathered = torch.zeros_like(self._gathered)

    def state_dict(self) -> dict[str, Tensor]:
        """See `d9d.loop.Metric.state_dict`."""
        return {"gathered": self._gathered}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `d9d.loop.Metric.load_state_dict`."""
        self._gathered = state["gathered"].to(self._gathered.device, copy=True)
