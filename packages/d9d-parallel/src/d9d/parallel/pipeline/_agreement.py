"""All ranks of a pipeline mean the same step, or all of them say what is wrong: before anything is sent."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from d9d.mesh import all_gather_objects

from ._tree import TreeForm


@attrs.frozen
class Signature:
    """What one microbatch looks like."""

    inputs: TreeForm
    shared: TreeForm

    @functools.cached_property
    def key(self) -> str:
        """The same for equal signatures, in every process."""
        return f"{self.inputs!r} {self.shared!r}"


def agree(inputs: Sequence[Any], shared: Sequence[Any], group: ProcessGroup) -> list[Signature]:
    """The signature of each microbatch, which is the same on all ranks; collective, one round of 24 bytes a rank.

    Args:
        inputs: A tree for each microbatch.
        shared: A tree for each microbatch.
        group: The pipeline's ranks.

    Raises:
        ValueError: On every rank, if one has no microbatch, or not as many shared as inputs, or if the ranks have
            different numbers of microbatches or trees of different structure, shapes, dtypes or constants.
    """
    fault = _fault(inputs, shared)
    signatures = [] if fault else [Signature(TreeForm.of(i), TreeForm.of(s)) for i, s in zip(inputs, shared)]
    digest = hashlib.sha256("\n".join(signature.key for signature in signatures).encode()).digest()
    words = [int.from_bytes(digest[i : i + 8], signed=True) for i in (0, 8)]
    mine = torch.tensor([fault is not None, *words], dtype=torch.int64, device=_device_of(group))
    found = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather_into_tensor(found.view(-1), mine, group=group)
    ranks: list[list[int]] = found.tolist()
    if any(row[0] or row != ranks[0] for row in ranks):
        # Rare, so that it may be slow.
        raise ValueError(_explain(all_gather_objects((fault, signatures), group)))
    return signatures


def _fault(inputs: Sequence[Any], shared: Sequence[Any]) -> str | None:
    if len(inputs) != len(shared):
        return f"{len(inputs)} inputs and {len(shared)} shared were given: give one of each for every microbatch"
    if not inputs:
        return "no microbatch was given: a step takes at least one"
    return None


def _explain(found: Sequence[tuple[str | None, Sequence[Signature]]]) -> str:
    faults = [f"rank {rank} of the pipeline: {fault}" for rank, (fault, _) in enumerate(found) if fault]
    if faults:
        return "; ".join(faults)
    first = found[0][1]
    for rank, (_, signatures) in enumerate(found):
        if len(signatures) != len(first):
            return (
                f"rank 0 of the pipeline was given {len(first)} microbatches, and rank {rank} {len(signatures)}: give "
                "all of them the same batch"
            )
    for rank, (_, signatures) in enumerate(found):
        for microbatch, (mine, theirs) in enumerate(zip(signatures, first)):
            for what, form, expected in (
                ("inputs", mine.inputs, theirs.inputs),
                ("shared", mine.shared, theirs.shared),
            ):
                if difference := form.difference(expected):
                    return (
                        f"microbatch {microbatch} differs between ranks of the pipeline: on rank {rank}, {what}: "
                        f"{difference} as on rank 0; give all of them the same batch"
                    )
    return "the ranks of the pipeline were given batches that differ in an object that is no tensor"


def _device_of(group: ProcessGroup) -> torch.device:
    """Where the group takes tensors: on the CPU if it can, where the host need not wait for the GPU."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
