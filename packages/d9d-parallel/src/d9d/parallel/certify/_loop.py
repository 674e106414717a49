"""The loop that is certified unless the user brings one: the parts of this package, in their order."""

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn

from d9d.mesh import DistContext

from .._clip import scale_and_clip_
from .._fsdp import is_fully_sharded, sharded_microbatch
from .._layout import local_tensor
from .._loss import LossSum
from .._norm import global_norm
from .._sync import GradientSync
from ._protocols import Batch, Loss, Optimizer, Step, StepResult


def default_loop(
    module: nn.Module, loss: Loss[nn.Module, Batch], optimizer: Optimizer, context: DistContext
) -> Step[Batch]:
    """Sum gradients over microbatches and ranks, divide and clip once, step."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    grad_dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    sync = GradientSync([[p for p in parameters if not is_fully_sharded(p)]], grad_dtype=grad_dtype)
    data = context.mesh("batch")

    def step(microbatches: Sequence[Batch], *, max_norm: float | None) -> StepResult:
        losses = []
        module.zero_grad()
        for index, microbatch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            with sync.microbatch(0, last=last), sharded_microbatch(module, last=last):
                found = loss(module, microbatch)
                torch.autograd.backward(found.sum)
            losses.append(found.detach())
        sync.finish()
        total = torch.stack([torch.stack([part.sum.double(), part.weight.double()]) for part in losses]).sum(0)
        for dim in ("dp", "cp"):
            dist.all_reduce(total, group=data.get_group(dim))
        loss_sum, weight = total.unbind()
        norm = global_norm(parameters)
        scale_and_clip_(parameters, weight=weight, norm=norm, max_norm=max_norm)
        optimizer.step()
        return StepResult(total=LossSum(loss_sum, weight), norm=norm / weight)

    return step


class GradientDescent:
    """Subtracts a tenth of the gradient: the optimizer that is certified unless the user brings one.

    What is wrong with a gradient shows in its full size, and tensors of any layout mix.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        """Make a step."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_tensor(parameter).sub_(local_tensor(parameter.grad), alpha=0.1)
