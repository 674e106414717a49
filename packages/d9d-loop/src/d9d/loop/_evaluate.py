"""The loss over a whole data set."""

from typing import Any

import torch
from torch import nn

from d9d.mesh import DistContext
from d9d.parallel import LossSum

from ._batch_sum import sum_losses
from ._protocols import Task
from .data import Collate, SizedDataset, to_device


@torch.no_grad()
def evaluate(
    module: nn.Module,
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
    The module is in evaluation mode meanwhile. `task.loss` feeds the metrics of `task`: give a task of its own where
    that matters.

    Args:
        module: On the device, parallelized or not.
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
    was_training = module.training
    module.eval()
    try:
        losses = []
        for first in range(0, len(blocks), ranks):
            counts = first + rank < len(blocks)
            block = blocks[first + rank] if counts else blocks[-1]
            inputs, shared = task.inputs(to_device(collate([dataset[index] for index in block]), ctx.device))
            loss = task.loss(module(inputs, shared), shared)
            losses.append(
                loss if counts else LossSum(sum=torch.zeros_like(loss.sum), weight=torch.zeros_like(loss.weight))
            )
    finally:
        module.train(was_training)
    return sum_losses(losses, ctx)
