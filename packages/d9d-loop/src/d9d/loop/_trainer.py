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
from d9d.parallel import GradientSync, StageInfo, global_norm, is_fully_sharded, scale_and_clip_, sharded_microbatch

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

    Building it checks what can be checked before the first step, builds the model on meta, parallelizes and
    initializes it, and restores the last complete checkpoint in the directory of the run.

    Args:
        config: The run.
        ctx: This rank and its meshes.
        provider: Builds the model.
        task: Gives inputs, loss and metrics.
        dataset: The same on every rank.
        collate: Makes a microbatch of a list of samples.

    Raises:
        ValueError: If the global batch does not divide, the mesh has a degree that this trainer has no use for, the
            data set is empty, a metric has a name of the trainer's own, or a checkpoint in the directory is of
            another run.
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
        self.module = _build(config, ctx, provider)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        grad_dtype = torch.promote_types(getattr(torch, config.dtype), torch.float32)
        synced = [parameter for parameter in self.parameters.values() if not is_fully_sharded(parameter)]
        self.sync = GradientSync([synced], grad_dtype=grad_dtype)
        self.optimizer = config.optimizer.build(self.module.named_parameters())
        self.metrics = _metrics(task)
        self.flops_per_token = None if config.sequence is None else provider.flops_per_token(config.sequence)
        self.state = RunState(
            module=self.module,
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
        microbatches = list(self.batches.step(self.step))
        losses = []
        self.module.zero_grad()
        for index, batch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            with self.sync.microbatch(0, last=last), sharded_microbatch(self.module, last=last):
                inputs, shared = self.task.inputs(to_device(batch, self.ctx.device))
                loss = self.task.loss(self.module(inputs, shared), shared)
                torch.autograd.backward(loss.sum)
            losses.append(loss.detach())
        self.sync.finish()
        total = sum_losses(losses, self.ctx)

        norm = global_norm(self.parameters.values())
        is_to_step = scale_and_clip_(
            self.parameters.items(),
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
    """This data rank's batches, after a look at the degrees of the mesh."""
    for degree, value in {"pipeline": ctx.config.pipeline, "context": ctx.config.context}.items():
        if value != 1:
            raise ValueError(f"mesh.{degree}={value!r}: this trainer cannot use it yet; set mesh.{degree} to 1")
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


def _build(config: TrainerConfig, ctx: DistContext, provider: ModelProvider) -> nn.Module:
    """The model on this rank's device: laid out while on meta, then initialized independently of the layout."""
    stage = StageInfo()
    with torch.device("meta"):
        module = provider.build(stage)
    module.to(getattr(torch, config.dtype))
    provider.parallelize(module, stage, ctx)
    materialize(module, device=ctx.device, seed=config.seed)
    return module.train()
