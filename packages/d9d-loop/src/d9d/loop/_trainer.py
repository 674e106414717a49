"""A training run, as a composition of the parts that d9d publishes.

Nothing here is needed to use them: copy this module and change it.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from d9d.ckpt import JobCheckpoints
from d9d.mesh import DistContext, RandomState, materialize, seed_rank
from d9d.parallel import StageInfo, global_norm, scale_and_clip_
from d9d.parallel.pipeline import Executor, Program, TiedParameters, sync_stages

from ._batch_sum import sum_losses
from ._config import TrainerConfig
from ._log import OWN_NUMBERS, RunLog, StepResult
from ._protocols import Metric, ModelProvider, Task
from ._state import RunState
from .data import Batches, Collate, SampleOrder, SizedDataset, to_device
from .optim import set_learning_rate
from .track import Speedometer, peak_flops


class Trainer:
    """Trains one model on one data set, and goes on where an earlier process was killed.

    Building it checks what can be checked before the first step, builds this rank's stages on meta, parallelizes and
    initializes them, and restores the last complete checkpoint in the directory of the run.

    Args:
        config: The run.
        ctx: This rank and its meshes.
        provider: Builds the model.
        task: Gives inputs, loss and metrics.
        dataset: The same on every rank.
        collate: Makes a microbatch of a list of samples.

    Raises:
        ValueError: If the global batch does not divide, the mesh has a degree that this trainer has no use for, the
            schedule of the pipeline does not train or does not exist for the number of microbatches, the data set is
            empty, a metric has a name of the trainer's own, or a checkpoint in the directory is of another run.
        TypeError: If the module's state holds anything but tensors.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        ctx: DistContext,
        provider: ModelProvider,
        task: Task,
        dataset: SizedDataset[Any],
        collate: Collate,
    ) -> None:
        self.config, self.ctx, self.task = config, ctx, task
        self.batches = _batches(config, ctx, dataset, collate)
        self.pp_group = ctx.mesh("dense").get_group("pp")
        """Ranks that hold the other stages."""
        program = config.pipeline.program(ranks=self.pp_group.size(), microbatches=self.batches.accumulation)
        if not program.is_training:
            raise ValueError(f"trainer.pipeline is {config.pipeline.kind!r}, which has no backward: take another kind")
        self.stages = _build_stages(config, ctx, provider, program)
        """This rank's part of the model, by stage; names in it are those of the whole."""
        self.tied = TiedParameters(self.stages, self.pp_group)
        self.parameters = {n: p for stage in self.stages.values() for n, p in stage.named_parameters()}
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self.sync, runtimes = sync_stages(self.stages, splits_backward=program.splits_backward)
        self.executor: Executor[Any, Any, Any] = Executor(
            self.stages, config.pipeline, self.pp_group, runtimes=runtimes, device=ctx.device
        )
        self.optimizer = config.optimizer.build(self.parameters.items())
        self.metrics = _metrics(task)
        self.flops_per_token = None if config.sequence is None else provider.flops_per_token(config.sequence)
        self.state = RunState(
            modules=list(self.stages.values()),
            copies=self.tied.copies,
            optimizer=self.optimizer,
            metrics=self.metrics,
            random=RandomState(ctx.device),
            identity={"seed": config.seed, "global_batch": config.global_batch, "samples": len(dataset)},
        )
        self.checkpoints = JobCheckpoints(config.directory / "checkpoints", keep=config.checkpoints_kept)

        self.step = 0
        """Steps made so far."""
        self.tokens = torch.zeros((), dtype=torch.float64, device=ctx.device)
        """Weight of all global batches so far."""
        self.nonfinite_steps = torch.zeros((), dtype=torch.int64, device=ctx.device)
        """Steps so far whose gradients held a NaN or an infinity."""
        self._seed_or_restore()

    def run(self) -> None:
        """Make the steps that are left, log and save on the way."""
        with contextlib.closing(self._open_log()) as log:
            while self.step < self.config.steps:
                result = self.train_step()
                is_last = self.step == self.config.steps
                if is_last or self.step % self.config.log_every == 0:
                    log.write(self.step, result, tokens=self.tokens, nonfinite_steps=self.nonfinite_steps)
                if is_last or self.step % self.config.checkpoint_every == 0:
                    with log.before_checkpoint():
                        self.save()

    def train_step(self) -> StepResult:
        """One optimizer step on the next global batch; collective.

        After an error in a microbatch the step has not been made, and may be made again; metrics keep what the task
        fed them. Where no label of the global batch counts, gradients are zero and the optimizer steps all the same.

        Raises:
            FloatingPointError: Gradients are not finite, and the config says to raise; the step has not been made.
        """
        batches = (to_device(batch, self.ctx.device) for batch in self.batches.step(self.step))
        inputs, shared = zip(*map(self.task.inputs, batches))
        for parameter in self.parameters.values():
            parameter.grad = None
        loss = self.executor.step(inputs, shared, self.task.loss)
        self.sync.finish()
        self.tied.sum_gradients()
        total = sum_losses([loss], self.ctx)

        norm = global_norm(self.trained.values(), pp_group=self.pp_group, tied=self.tied.stand_ins)
        is_to_step = scale_and_clip_(
            self.trained.items(),
            weight=total.weight,
            norm=norm,
            max_norm=self.config.max_norm,
            nonfinite=self.config.nonfinite,
        )
        lr = set_learning_rate(self.optimizer, self.config.schedule.factor(self.step, self.config.steps))
        if is_to_step:
            self.optimizer.step()

        self.step += 1
        self.tokens += total.weight
        self.nonfinite_steps += norm.isfinite().logical_not()
        return StepResult(total=total, norm=norm, lr=lr)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole model, ready to export; copies have their original's."""
        named: dict[str, nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            named.setdefault(self.tied.copies.get(name, name), parameter)
        return named

    def save(self) -> None:
        """Save a checkpoint of the steps made so far; collective."""
        counters = {"tokens": int(self.tokens), "nonfinite_steps": int(self.nonfinite_steps)}
        self.state.save(self.checkpoints, self.step, counters=counters)

    def _seed_or_restore(self) -> None:
        checkpoint = self.checkpoints.latest()
        seed_rank(self.ctx.mesh("batch"), seed=self.config.seed, step=0 if checkpoint is None else checkpoint.step)
        if checkpoint is not None:
            self.step = checkpoint.step
            counters = self.state.restore(checkpoint)
            self.tokens.fill_(counters["tokens"])
            self.nonfinite_steps.fill_(counters["nonfinite_steps"])

    def _open_log(self) -> RunLog:
        config, ctx = self.config, self.ctx
        trackers = []
        if ctx.is_main:
            config.directory.mkdir(parents=True, exist_ok=True)
            # A resumed run opens them once more: what they draw (rich does) must not move its streams.
            with self.state.random.preserved():
                trackers = [
                    tracker.open(config.directory, done=self.step, steps=config.steps) for tracker in config.trackers
                ]
        peak = peak_flops(ctx.device, getattr(torch, config.dtype))
        speed = Speedometer(
            ctx.device, flops=self.flops_per_token, peak=None if peak is None else peak * ctx.world_size
        )
        return RunLog(trackers, metrics=self.metrics, speed=speed, ctx=ctx, step=self.step, tokens=self.tokens)


def _batches(config: TrainerConfig, ctx: DistContext, dataset: SizedDataset[Any], collate: Collate) -> Batches:
    """This data rank's batches, after a look at the mesh."""
    if ctx.config.context != 1:
        raise ValueError(f"mesh.context={ctx.config.context!r}: this trainer cannot use it yet; set mesh.context to 1")
    data = ctx.mesh("batch")["dp"]
    share, left = divmod(config.global_batch, data.size())
    return Batches(
        dataset=dataset,
        collate=collate,
        order=SampleOrder(length=len(dataset), seed=config.seed),
        global_batch=config.global_batch,
        microbatch=config.microbatch or (1 if left else share),
        rank=data.get_local_rank(),
        ranks=data.size(),
    )


def _metrics(task: Task) -> Mapping[str, Metric]:
    """The task's metrics, after a look at their names."""
    metrics = task.metrics()
    if taken := sorted(OWN_NUMBERS & metrics.keys()):
        raise ValueError(f"the task has metrics called {taken!r}, as numbers of the trainer are; rename them")
    return metrics


def _build_stages(
    config: TrainerConfig, ctx: DistContext, provider: ModelProvider, program: Program
) -> dict[int, nn.Module]:
    """This rank's stages on its device: laid out while on meta, then initialized independently of the layout."""
    stages: dict[int, nn.Module] = {}
    for number in program.stages_of(ctx.mesh("dense").get_local_rank("pp")):
        stage = StageInfo(number, program.stages)
        with torch.device("meta"):
            module = provider.build(stage)
        module.to(getattr(torch, config.dtype))
        provider.parallelize(module, stage, ctx)
        materialize(module, device=ctx.device, seed=config.seed)
        stages[number] = module.train()
    return stages
