"""A subject laid out on a mesh, with the loop that trains it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from d9d.mesh import DistContext, all_gather_objects

from .._loss import LossSum
from .._stage import StageInfo
from ..pipeline import Schedule
from ._pipeline_loop import parameters_of, pipeline_loop
from ._protocols import Step
from ._subject import LoadedSubject, named_parameters


@attrs.frozen
class Run:
    """What is stepped and looked at on one rank."""

    stages: Sequence[nn.Module]
    """This rank's part of the model; one, which is all of it, without a pipeline."""

    step: Step[Any]
    """Makes a step."""

    losses: list[LossSum]
    """Of every microbatch that this rank has computed the loss of."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters under all their names."""
        return {name: parameter for stage in self.stages for name, parameter in named_parameters(stage).items()}


def prepare(subject: LoadedSubject, context: DistContext, schedule: Schedule | None, microbatches: int) -> Run | str:
    """Build, lay out and initialize the model on this rank; why that was refused, if it was. Collective.

    Args:
        subject: What to build.
        context: Where.
        schedule: Of the pipeline, if there is one.
        microbatches: How many it gets.
    """
    refusal, stages, splits_backward = "", {}, False
    try:
        if schedule is None:
            stages = {0: subject.build()}
        else:
            pp = context.mesh("dense")["pp"]
            program = schedule.program(ranks=pp.size(), microbatches=microbatches)
            numbers = program.stages_of(pp.get_local_rank())
            stages = {number: subject.build_stage(StageInfo(number, program.stages)) for number in numbers}
            splits_backward = program.splits_backward
        for stage in stages.values():
            subject.parallelize(stage, context)
    except (ValueError, NotImplementedError) as error:
        refusal = str(error) or repr(error)
    refusals = all_gather_objects(refusal)
    if any(refusals) and not all(refusals):
        ranks = [rank for rank, reason in enumerate(refusals) if reason]
        raise RuntimeError(f"parallelize refused on ranks {ranks} and not on the others: {max(refusals)}")
    if refusal:
        return refusal
    for stage in stages.values():
        subject.initialize(stage)
    losses: list[LossSum] = []
    if schedule is None:
        step = subject.loop(stages[0], _recorded(subject.loss, losses), context)
    else:
        step = _pipeline_step(subject, stages, losses, context, schedule, splits_backward=splits_backward)
    return Run(list(stages.values()), step, losses)


def _pipeline_step(
    subject: LoadedSubject,
    stages: Mapping[int, nn.Module],
    losses: list[LossSum],
    context: DistContext,
    schedule: Schedule,
    *,
    splits_backward: bool,
) -> Step[Any]:
    return pipeline_loop(
        stages,
        inputs=subject.functions["stage inputs"],
        loss=_recorded(subject.functions["stage loss"], losses),
        optimizer=subject.optimizer(parameters_of(stages.values())),
        context=context,
        schedule=schedule,
        splits_backward=splits_backward,
    )


def _recorded(loss: Callable[[Any, Any], LossSum], losses: list[LossSum]) -> Callable[[Any, Any], LossSum]:
    def recorded(first: Any, second: Any) -> LossSum:
        found = loss(first, second)
        losses.append(found.detach())
        return found

    return recorded
