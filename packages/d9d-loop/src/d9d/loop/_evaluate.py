"""The loss over a whole data set."""

from typing import Any

import torch

from d9d.mesh import DistContext
from d9d.parallel import LossSum
from d9d.parallel.pipeline import Executor

from ._batch_sum import sum_losses
from ._protocols import Task
from .data import Collate, SizedDataset, to_device

_IN_FLIGHT = 2
"""Microbatches for each rank of the pipeline."""


@torch.no_grad()
def evaluate(
    executor: Executor[Any, Any, Any],
    task: Task,
    dataset: SizedDataset[Any],
    *,
    collate: Collate,
    microbatch: int,
    ctx: DistContext,
) -> LossSum:
    """The summed loss and weight of a data set, each sample counted once, equal on every rank.

    The data ranks share the samples in blocks of a microbatch. All of them run the same number of forward passes,
    since the model may hold collectives: a rank that has no samples left repeats a block and does not count it.
    The stages are in evaluation mode meanwhile. `task.loss` feeds the metrics of `task`: give a task of its own where
    that matters.

    Args:
        executor: Of the model: `Trainer.executor`, or one made for this.
        task: Gives inputs and loss.
        dataset: The same on every rank.
        collate: Makes a batch of a list of samples.
        microbatch: Samples of one forward pass on one rank; the last one may have fewer.
        ctx: Of this rank; every rank must call this.

    Raises:
        ValueError: If the data set is empty, or a microbatch would be.
    """
    if microbatch < 1:
        raise ValueError(f"evaluate got microbatch={microbatch!r}; it takes at least one sample at a time")
    if not len(dataset):
        raise ValueError("evaluate got an empty data set; give it at least one sample")
    mesh = ctx.mesh("batch")["dp"]
    rank, ranks = mesh.get_local_rank(), mesh.size()
    blocks = [range(len(dataset))[start : start + microbatch] for start in range(0, len(dataset), microbatch)]
    turns = [range(first, first + ranks) for first in range(0, len(blocks), ranks)]
    losses = [LossSum(sum=torch.zeros((), device=ctx.device), weight=torch.zeros((), device=ctx.device))]
    stages = executor.stages.values()
    modes = [stage.training for stage in stages]
    for stage in stages:
        stage.eval()
    try:
        # As many at a time as it takes to have every stage at work.
        for first in range(0, len(turns), _IN_FLIGHT * executor.ranks):
            mine = [turn[rank] for turn in turns[first : first + _IN_FLIGHT * executor.ranks]]
            batches = [[dataset[index] for index in blocks[min(block, len(blocks) - 1)]] for block in mine]
            inputs, shared = zip(*(task.inputs(to_device(collate(batch), ctx.device)) for batch in batches))
            for block, out, known in zip(mine, executor.infer(inputs, shared), shared):
                loss = task.loss(out, known)
                if block < len(blocks):
                    losses.append(loss)
    finally:
        for stage, mode in zip(stages, modes):
            stage.train(mode)
    return sum_losses(losses, ctx)
