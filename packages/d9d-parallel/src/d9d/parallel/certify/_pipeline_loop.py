"""One optimizer step of a pipeline: the parts of this package, in their order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d9d.mesh import DistContext

from .._clip import scale_and_clip_
from .._loss import LossSum
from .._norm import global_norm
from ..pipeline import Executor, Schedule, TiedParameters, sync_stages
from ._protocols import Batch, Optimizer, Step, StepResult


def pipeline_loop(
    stages: Mapping[int, nn.Module],
    *,
    inputs: Callable[[Batch], tuple[Any, Any]],
    loss: Callable[[Any, Any], LossSum],
    optimizer: Optimizer,
    context: DistContext,
    schedule: Schedule,
    splits_backward: bool,
) -> Step[Batch]:
    """Run microbatches through the stages, sum gradients over ranks and ties, divide and clip once, step."""
    parameters = [p for p in parameters_of(stages.values()) if p.requires_grad]
    sync, runtimes = sync_stages(stages, splits_backward=splits_backward)
    group = context.mesh("dense").get_group("pp")
    tied = TiedParameters(stages, group)
    executor: Executor[Any, Any, Any] = Executor(stages, schedule, group, runtimes=runtimes)
    data = context.mesh("batch")

    def step(microbatches: Sequence[Batch], *, max_norm: float | None) -> StepResult:
        for parameter in parameters:
            parameter.grad = None
        given, shared = zip(*map(inputs, microbatches))
        found = executor.step(given, shared, loss)
        sync.finish()
        tied.sum_gradients()
        total = torch.stack([found.sum.double(), found.weight.double()])
        for dim in ("pp", "dp", "cp"):
            dist.all_reduce(total, group=data.get_group(dim))
        loss_sum, weight = total.unbind()
        norm = global_norm(parameters, pp_group=group, tied=tied.stand_ins)
        scale_and_clip_(parameters, weight=weight, norm=norm, max_norm=max_norm)
        optimizer.step()
        return StepResult(total=LossSum(loss_sum, weight), norm=norm / weight)

    return step


def parameters_of(stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    """All parameters of some stages."""
    return [parameter for stage in stages for parameter in stage.parameters()]
