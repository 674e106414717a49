"""The certificate: layouts run on this machine's CPU against one process."""

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import Reference, run_world

from ._certificate import Certificate
from ._comparison import Comparison
from ._layout_result import LayoutResult, world_size
from ._loop import GradientDescent, default_loop
from ._oracle import Oracle, compute
from ._protocols import Batch, Loop, Loss, MakeOptimizer, ModuleIn, Split
from ._rank import run_layouts
from ._staged import Staged
from ._subject import Subject


def certify(
    model: Callable[[], ModuleIn],
    parallelize: Callable[[ModuleIn, DistContext], None],
    loss: Loss[ModuleIn, Batch],
    split: Split[Batch],
    batch: Batch,
    *,
    meshes: Sequence[MeshConfig],
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-9,
    microbatches: Sequence[int] = (1, 2),
    max_norms: Sequence[float | None] = (None, 1e-2),
    loop: Loop = default_loop,
    optimizer: MakeOptimizer = GradientDescent,
    staged: Staged[Batch] | None = None,
    timeout: float = 600.0,
) -> Certificate:
    """Prove that a layout trains as one process does, or show where it does not.

    Each mesh is run on as many processes of this machine, on CPU, with a model small enough for that; one process does
    plain autograd on the whole batch. Compared on every rank are the initial weights, ties, the loss that each data
    rank sees, total loss and weight, every gradient, its norm, and every parameter after each step; and whether all
    ranks hold the same bits.

    ``model`` is called with the same random state everywhere. Weights that it draws are used as they are; a module that
    it leaves on ``meta`` is initialized by `d9d.mesh.materialize` after ``parallelize``. Random numbers at run time
    (dropout) are to be off. Buffers are not compared.

    All functions must be defined at the top of a file that can be imported, since other processes look them up there;
    a script that calls this needs the guard ``if __name__ == "__main__":``.

    Args:
        model: Builds the model.
        parallelize: Lays it out in place; a mesh that it refuses with a ValueError is reported as refused.
        loss: Summed loss and weight of a batch or of a part of it.
        split: ``split(batch, index, count)`` gives one of ``count`` parts of the batch. Parts of unequal weight prove
            more. Data rank r of n with k microbatches gets the parts ``r·k`` to ``r·k + k − 1`` of ``n·k``.
        batch: The global batch; picklable.
        meshes: Every degree given (no -1).
        dtype: Of parameters, and of floating-point tensors in the batch.
        rtol: Largest relative error that passes.
        microbatches: In how many parts a data rank takes its share; each is a run of its own.
        max_norms: One step for each, its gradient clipped to this norm. The second step sees what the first one left.
        loop: Gradient sums, norm, clipping and step; by default those of this package. See `Loop`.
        optimizer: Makes the optimizer of both sides.
        staged: The model in stages, for meshes with ``pipeline``; ``parallelize`` then gets each stage. ``loop`` is for
            the others. Without it such meshes are reported as refused.
        timeout: Seconds for all meshes of one number of ranks.

    Raises:
        ValueError: A function cannot be found by other processes, a degree is open, or the batch proves nothing since
            its loss is not finite or its weight is 0.
        WorldError: A rank raised, with its traceback.
        WorldTimeoutError: A layout hangs, with the stacks of its ranks.
    """
    given: dict[str, Callable[..., Any]] = {
        "model": model, "parallelize": parallelize, "loss": loss, "split": split, "loop": loop, "optimizer": optimizer,
    }  # fmt: skip
    if staged:
        given |= {"stage": staged.stage, "stage inputs": staged.inputs, "stage loss": staged.loss}
    subject = Subject(
        functions={role: Reference.to(function, role=role) for role, function in given.items()},
        batch=pickle.dumps(batch),
        dtype=dtype,
        microbatches=tuple(microbatches),
        max_norms=tuple(max_norms),
        schedules=tuple(staged.schedules) if staged else (),
        rtol=rtol,
    )
    results, to_run = _by_world_size(meshes)
    data_ranks = {mesh.replicate * mesh.shard for same_size in to_run.values() for mesh in same_size}
    counts = sorted({ranks * parts for ranks in data_ranks for parts in microbatches})
    [oracle] = run_world(1, compute, subject, counts, timeout=timeout)
    _check(oracle)
    for size, same_size in to_run.items():
        per_rank = run_world(size, run_layouts, subject, oracle, same_size, timeout=timeout)
        results |= {mesh: _result(mesh, found) for mesh, found in zip(same_size, zip(*per_rank))}
    return Certificate(dtype=dtype, rtol=rtol, layouts=tuple(results[mesh] for mesh in meshes), notes=_notes(oracle))


def _by_world_size(meshes: Sequence[MeshConfig]) -> tuple[dict[MeshConfig, LayoutResult], dict[int, list[MeshConfig]]]:
    """The results of meshes that cannot be, and the others by the number of ranks that they take."""
    impossible: dict[MeshConfig, LayoutResult] = {}
    possible: dict[int, list[MeshConfig]] = {}
    for mesh in meshes:
        if -1 in attrs.astuple(mesh):
            raise ValueError(f"{mesh} leaves a degree open: give every degree, the number of ranks is their product")
        try:
            mesh.fold_experts()
        except ValueError as error:
            impossible[mesh] = LayoutResult(mesh=mesh, refusal=str(error))
        else:
            possible.setdefault(world_size(mesh), []).append(mesh)
    return impossible, possible


def _result(mesh: MeshConfig, found: Sequence[str | list[Comparison]]) -> LayoutResult:
    """What all ranks of a mesh found."""
    refusals = [reason for reason in found if isinstance(reason, str)]
    if refusals:
        return LayoutResult(mesh=mesh, refusal=refusals[0])
    return LayoutResult(mesh=mesh, comparisons=tuple(c for part in found if not isinstance(part, str) for c in part))


def _check(oracle: Oracle) -> None:
    loss, weight = oracle.total.tolist()
    if not weight > 0:
        raise ValueError(f"the batch has a weight of {weight!r}: with nothing to learn from it, it proves nothing")
    if not all(math.isfinite(step.norm.item()) for step in oracle.steps):
        raise ValueError(
            f"in one process the loss is {loss!r} and the gradient not finite: there is nothing to compare with"
        )


def _notes(oracle: Oracle) -> tuple[str, ...]:
    """What one can see of the subject alone."""
    notes: list[str] = []
    for count, shares in oracle.shares.items():
        parts = [tuple(part) for part in shares.tolist()]
        if twins := [i for i, part in enumerate(parts) if parts.count(part) > 1 and part[1]]:
            notes.append(f"of {count} parts of the batch {_listed(twins)} are not all different.")
        elif count > 1 and len({weight for _, weight in parts}) == 1:
            notes.append(f"{count} parts of the batch weigh the same, so a mean of their means would pass.")
    if unreached := [name for name, gradient in oracle.steps[0].gradients.items() if not gradient.any()]:
        notes.append(f"no gradient reaches {_listed(unreached)}.")
    return tuple(notes)


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
