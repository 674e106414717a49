"""Runs a schedule on the stages of a model."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .._loss import LossSum
from ._action import Action
from ._agreement import agree
from ._channels import Channels
from ._derive import derive
from ._forms import Forms
from ._holdings import placement_of
from ._plan import Plan
from ._program import Program
from ._schedule import Schedule
from ._stage import StageRuntime
from ._step import Batch, Step
from .schedules import inference

In = TypeVar("In")
Shared = TypeVar("Shared")
Out = TypeVar("Out")


class Executor(Generic[In, Shared, Out]):
    """One rank of a pipeline.

    Collective, as each of its methods is: every rank of the pipeline makes one with its own stages and the same
    schedule; on CUDA every pipeline of the job does so at the same time.

    Args:
        stages: This rank's stages, by their number in the whole model. Each is a `Stage`, or a module that takes one
            argument, the inputs.
        schedule: Who computes what when, and thereby which rank holds which stage.
        group: The pipeline's ranks.
        runtimes: For stages whose parameters are sharded or replicated. Gradients of the others accumulate in ``grad``.
        max_unsharded: How many stages of a rank may be gathered at a time; ``None`` for all of them.
        device: Where this rank computes; without it, where its parameters are, or the CPU if it has none.
        timed: Entered around the computation of each F, B, I and W, once what it reads is there: to measure, say.

    Raises:
        ValueError: On every rank, if stages are missing or held twice, or not as many on each rank as the schedule has.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: ProcessGroup,
        *,
        runtimes: Mapping[int, StageRuntime] | None = None,
        max_unsharded: int | None = None,
        device: torch.device | None = None,
        timed: Callable[[Action], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._schedule = schedule
        self._group = group
        self._runtimes = dict(runtimes or {})
        self._max_unsharded = max_unsharded
        self._device = device or _device_of(stages.values())
        self.stages = dict(stages)
        """This rank's stages, as they were given."""
        self.ranks = dist.get_world_size(group)
        """Of the pipeline."""
        self._calls = {stage: _call_of(module) for stage, module in stages.items()}
        self._timed = timed or (lambda _: nullcontext())
        self._placement = placement_of(stages, self._runtimes, schedule.stages_per_rank, group)
        there = {(here, after) for here, after in pairwise(self._placement) if here != after}
        back = {(after, here) for here, after in there}
        self._channels = Channels(group, there | back, self._device)
        self._forms = Forms()
        self._training_plans: dict[int, Plan] = {}
        self._inference_plans: dict[int, Plan] = {}
        self.peak_live = 0
        """The most pairs of stage and microbatch of this rank that were alive at a time in the last step."""

    def step(self, inputs: Sequence[In], shared: Sequence[Shared], loss: Callable[[Out, Shared], LossSum]) -> LossSum:
        """Forward and backward of some microbatches; gradients add to what is there.

        Args:
            inputs: Of the model, one tree a microbatch; the same on every rank. Their shapes may differ.
            shared: What every stage and the loss get besides, one tree a microbatch; the same on every rank.
            loss: Of one microbatch; called where the last stage is.

        Returns:
            The sum over the microbatches, detached; zeros on ranks without the last stage. Both numbers are fp64, so
            that ranks may sum them.

        Raises:
            ValueError: On every rank, before anything ran: the ranks were given different batches, or none; the
                schedule does not exist for so many microbatches.
            Exception: What a stage or the loss raised; a note names stage and microbatch. Nothing of the step is kept,
                but gradients that were added to ``grad``. Other ranks wait: have them end, as `DistContext` does.
        """
        batch = self._batch(inputs, shared, mode="training")
        plan = _cached(self._training_plans, len(inputs), self._plan_training)
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        total = LossSum(zero, zero.clone())

        def conclude(output: Out, microbatch: int) -> Tensor:
            found = loss(output, shared[microbatch])
            if not isinstance(found, LossSum):
                raise TypeError(f"the loss returned {found!r}: return a LossSum of the summed loss and its weight")
            total.sum.add_(found.sum.detach())
            total.weight.add_(found.weight)
            return found.sum

        self.peak_live = self._run(plan, batch, conclude)
        return total

    def infer(self, inputs: Sequence[In], shared: Sequence[Shared]) -> list[Out]:
        """Forward of some microbatches, without graphs.

        Args:
            inputs: As for `step`.
            shared: As for `step`.

        Returns:
            The model's outputs where the last stage is, one a microbatch; nothing elsewhere.

        Raises:
            ValueError: As in `step`.
            Exception: What a stage raised; as in `step`.
        """
        batch = self._batch(inputs, shared, mode="inference")
        plan = _cached(self._inference_plans, len(inputs), self._plan_inference)
        outputs: dict[int, Out] = {}

        def conclude(output: Out, microbatch: int) -> None:
            outputs[microbatch] = output

        self._run(plan, batch, conclude)
        return [outputs[microbatch] for microbatch in sorted(outputs)]

    def _batch(self, inputs: Sequence[In], shared: Sequence[Shared], *, mode: str) -> Batch:
        signatures = agree(inputs, shared, self._group)
        return Batch(inputs=inputs, shared=shared, kinds=[f"{mode} {s.key}" for s in signatures])

    def _plan_training(self, microbatches: int) -> Plan:
        program = self._schedule.program(ranks=self.ranks, microbatches=microbatches)
        if not program.is_training:
            raise ValueError(f"{self._schedule} has no backward: call infer, or take a schedule that trains")
        return self._plan(program)

    def _plan_inference(self, microbatches: int) -> Plan:
        return self._plan(inference(rank_of_stage=self._placement, microbatches=microbatches))

    def _plan(self, program: Program) -> Plan:
        if program.rank_of_stage != self._placement:
            raise ValueError(
                f"the schedule places the stages on the ranks {list(program.rank_of_stage)}, and they were given to "
                f"{list(self._placement)}: give each rank the stages that Program.stages_of says"
            )
        sharded = [stage for stage, runtime in self._runtimes.items() if runtime.is_sharded]
        complete = derive(program, sharded=sharded, max_unsharded=self._max_unsharded)
        return Plan(complete, dist.get_rank(self._group))

    def _run(self, plan: Plan, batch: Batch, conclude: Callable[[Out, int], Tensor | None]) -> int:
        step = Step(
            plan,
            stages=self._calls,
            runtimes=self._runtimes,
            channels=self._channels,
            forms=self._forms,
            batch=batch,
            timed=self._timed,
            conclude=conclude,
        )
        step.run()
        return step.peak_live


def _cached(plans: dict[int, Plan], microbatches: int, make: Callable[[int], Plan]) -> Plan:
    if microbatches not in plans:
        plans[microbatches] = make(microbatches)
    return plans[microbatches]


def _call_of(module: nn.Module) -> Callable[[Any, Any], Any]:
    """How to run a module: one of one argument gets the inputs alone."""
    try:
        inspect.signature(module.forward).bind(None, None)
    except TypeError:
        return lambda inputs, shared: module(inputs)  # noqa: ARG005
    return module


def _device_of(modules: Iterable[nn.Module]) -> torch.device:
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
