"""A loss as a sum over items and the weight of those items."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass


@dataclass(frozen=True)
class LossSum:
    """What a batch adds to the loss: nobody divides until the weight of the whole step is known.

    The mean of means over unequal batches is not the mean. So losses travel as sums; gradients are those of the sum,
    and the one division is by the global weight (`scale_and_clip_`).
    """

    sum: Tensor
    """Summed loss, 0-dim, fp32 or wider, with its graph."""

    weight: Tensor
    """Number (int64) or total weight (fp64) of the items in ``sum``, 0-dim, without a graph."""

    def __add__(self, other: "LossSum") -> "LossSum":
        return LossSum(self.sum + other.sum, self.weight + other.weight)

    def detach(self) -> "LossSum":
        """The same numbers without a graph."""
        return LossSum(self.sum.detach(), self.weight)

    def mean(self) -> Tensor:
        """Loss per unit of weight; 0 where there is no weight."""
        return torch.where(self.weight > 0, self.sum / self.weight, 0.0)


# A dataclass that is a pytree: every version of `fully_shard` finds the tensors in it when a module returns it.
register_dataclass(LossSum)
