"""What a user brings to be certified, and how their loop is driven."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import attrs
from torch import Tensor, nn

from d9d.mesh import DistContext

from .._loss import LossSum

Batch = TypeVar("Batch")
Batch_contra = TypeVar("Batch_contra", contravariant=True)
ModuleIn = TypeVar("ModuleIn", bound=nn.Module)

Loss: TypeAlias = Callable[[ModuleIn, Batch], LossSum]
"""The summed loss of a module on a batch, or on any part of one, and its weight."""

Split: TypeAlias = Callable[[Batch, int, int], Batch]
"""``split(batch, index, count)``: the index-th of ``count`` parts that make up a batch; parts may be unequal."""


class Optimizer(Protocol):
    """What an optimizer has to do; those of torch do it."""

    def step(self) -> Any:
        """Move the parameters by their gradients."""


MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
"""An optimizer for the parameters of a module."""


@attrs.frozen(kw_only=True)
class StepResult:
    """What a step says of itself, the same on every rank."""

    total: LossSum
    """Loss and weight of the whole batch, over all ranks and microbatches."""

    norm: Tensor
    """Norm of the gradient of the *mean* loss before it was clipped; 0-dim."""


class Step(Protocol[Batch_contra]):
    """One optimizer step on this rank's microbatches.

    It leaves in every parameter's ``grad`` what the optimizer stepped with: the clipped gradient of the mean loss.
    """

    def __call__(self, microbatches: Sequence[Batch_contra], *, max_norm: float | None) -> StepResult:
        """Make the step.

        Args:
            microbatches: This rank's part of the batch, in parts.
            max_norm: To which the gradient of the mean loss is clipped; ``None``: it is not.
        """


class Loop(Protocol):
    """What happens to a module that is laid out: built once a layout, as a training run builds its parts."""

    def __call__(
        self, module: nn.Module, loss: Loss[nn.Module, Batch], optimizer: Optimizer, context: DistContext
    ) -> Step[Batch]:
        """Give the function that makes steps."""
