"""What one rank of a layout finds."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig, all_gather_objects

from .._loss import LossSum
from ..pipeline import Schedule
from ._comparison import ALL_SHARES, Comparison, Quantity, ratio_and_error
from ._oracle import Oracle, OracleStep
from ._prepare import Run, prepare
from ._protocols import StepResult
from ._subject import LoadedSubject, Subject, named_parameters, whole

# Rounding errors of large intermediate values reach gradients that are small: so many units in the last place of the
# largest norm are no error.
_NOISE = 1000.0


def run_layouts(subject: Subject, oracle: Oracle, meshes: Sequence[MeshConfig]) -> list[str | list[Comparison]]:
    """Run all meshes of one number of ranks; collective.

    Returns:
        For each mesh why it was refused, or what was compared.
    """
    loaded = subject.load()
    return [_run_layout(loaded, oracle, mesh) for mesh in meshes]


def _run_layout(subject: LoadedSubject, oracle: Oracle, mesh: MeshConfig) -> str | list[Comparison]:
    found: list[Comparison] = []
    schedules: Sequence[Schedule | None] = subject.subject.schedules if mesh.pipeline > 1 else [None]
    if not schedules:
        return "the mesh has a pipeline, and certify was not given the model in stages: give staged="
    with DistContext.launch(mesh, "cpu") as context:
        for microbatches, schedule in itertools.product(subject.subject.microbatches, schedules):
            try:
                if isinstance(run := prepare(subject, context, schedule, microbatches), str):
                    return run
                compare = _Comparer(
                    context=context,
                    subject=subject.subject,
                    microbatches=microbatches,
                    schedule=schedule.kind if schedule else "",
                )
                found += _run(subject, run, oracle, context, compare)
            except Exception as error:
                error.add_note(f"while certifying {mesh} with {microbatches} microbatches a data rank, {schedule}")
                raise
    return found


@attrs.frozen(kw_only=True)
class _Comparer:
    """Compares on one rank, in one run."""

    context: DistContext
    subject: Subject
    microbatches: int
    schedule: str

    def tensors(
        self, quantity: Quantity, step: int, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> Iterator[Comparison]:
        """Compare parameters, or their gradients, by name."""
        largest = max((torch.linalg.vector_norm(t).item() for t in expected.values()), default=0.0)
        floor = largest * _NOISE * torch.finfo(self.subject.dtype).eps / self.subject.rtol
        for name, tensor in found.items():
            yield self.one(quantity, step, tensor, expected[name], name=name, floor=floor)

    def one(
        self, quantity: Quantity, step: int, found: Tensor, expected: Tensor, *, name: str = "", floor: float = 0.0
    ) -> Comparison:
        """Compare one value."""
        ratio, error = ratio_and_error(found, expected, floor=floor)
        return self.verdict(quantity, step, name, ratio, error, limit=self.subject.rtol)

    def verdict(
        self, quantity: Quantity, step: int, name: str, ratio: float, error: float, *, limit: float
    ) -> Comparison:
        """Put down what was found."""
        return Comparison(
            quantity=quantity,
            name=name,
            rank=self.context.rank,
            microbatches=self.microbatches,
            schedule=self.schedule,
            step=step,
            ratio=ratio,
            error=error,
            limit=limit,
        )


def _run(
    subject: LoadedSubject, run: Run, oracle: Oracle, context: DistContext, compare: _Comparer
) -> Iterator[Comparison]:
    before = list(_compare_start(compare, run, oracle))
    yield from before
    if any(all_gather_objects(any(not c.passed for c in before))):
        # All that follows would be wrong, or raise.
        return

    data = context.mesh("batch")
    rank, ranks = data.get_local_rank("dp"), data["dp"].size()
    count = ranks * compare.microbatches
    first, end = rank * compare.microbatches, (rank + 1) * compare.microbatches
    for number, (max_norm, expected) in enumerate(zip(subject.subject.max_norms, oracle.steps), start=1):
        result = run.step([subject.part(part, count) for part in range(first, end)], max_norm=max_norm)
        if number == 1:
            shares = oracle.shares[count]
            yield compare.one(Quantity.SHARE, 1, shares.sum(0), oracle.total, name=ALL_SHARES)
            share = shares[first:end].sum(0)
            yield compare.one(Quantity.SHARE, 1, _sum(run.losses, context), share, name=f"data rank {rank}")
        yield from _compare_step(compare, number, run.named_parameters(), result, expected)


def _compare_start(compare: _Comparer, run: Run, oracle: Oracle) -> Iterator[Comparison]:
    parameters = run.named_parameters()
    _check_shapes(parameters, oracle)
    yield from compare.tensors(Quantity.INITIAL, 0, _whole(parameters), oracle.initial)
    for names, stage in itertools.product(oracle.ties, run.stages):
        held = named_parameters(stage)
        # Stages of a pipeline have a copy each.
        if here := [name for name in names if name in held]:
            is_tied = len({id(held[name]) for name in here}) == 1
            yield compare.verdict(Quantity.TIE, 0, " = ".join(names), 1.0, 0.0 if is_tied else math.inf, limit=0.0)


def _compare_step(
    compare: _Comparer,
    number: int,
    parameters: Mapping[str, nn.Parameter],
    result: StepResult,
    expected: OracleStep,
) -> Iterator[Comparison]:
    gradients = {
        name: torch.zeros(parameter.shape, dtype=parameter.dtype) if parameter.grad is None else whole(parameter.grad)
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }
    yield compare.one(Quantity.WEIGHT, number, whole(result.total.weight), expected.weight)
    yield compare.one(Quantity.LOSS, number, whole(result.total.sum) / whole(result.total.weight), expected.loss)
    yield from compare.tensors(Quantity.GRADIENT, number, gradients, expected.gradients)
    yield compare.one(Quantity.NORM, number, whole(result.norm), expected.norm)
    updated = _whole(parameters)
    yield from compare.tensors(Quantity.PARAMETER, number, updated, expected.parameters)
    yield from _replicas(compare, number, updated)


def _replicas(compare: _Comparer, number: int, parameters: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """Whether this rank sees the bits that the first one with the parameter sees; else they would drift apart."""
    firsts: dict[str, Tensor] = {}
    for of_rank in all_gather_objects(dict(parameters)):
        firsts = {**of_rank, **firsts}
    for name, tensor in parameters.items():
        ratio, error = ratio_and_error(tensor, firsts[name])
        yield compare.verdict(Quantity.REPLICA, number, name, ratio, error, limit=0.0)


def _check_shapes(parameters: Mapping[str, nn.Parameter], oracle: Oracle) -> None:
    everywhere = {name for of_rank in all_gather_objects(list(parameters)) for name in of_rank}
    if everywhere != oracle.initial.keys():
        raise RuntimeError(
            f"the layout has parameters {sorted(everywhere - oracle.initial.keys())} that one process lacks, "
            f"and lacks {sorted(oracle.initial.keys() - everywhere)}"
        )
    for name, parameter in parameters.items():
        if parameter.shape != (shape := oracle.initial[name].shape):
            raise RuntimeError(
                f"{name} has the shape {tuple(parameter.shape)} in the layout and {tuple(shape)} in one process: what "
                "is split over ranks is to be a DTensor, or nobody can say what it is part of"
            )


def _sum(losses: Sequence[LossSum], context: DistContext) -> Tensor:
    """Loss and weight of this data rank."""
    total = torch.zeros(2, dtype=torch.float64)
    for loss in losses:
        total += torch.stack([whole(loss.sum).double(), whole(loss.weight).double()])
    for dim in ("pp", "cp"):
        dist.all_reduce(total, group=context.mesh("batch").get_group(dim))
    return total


def _whole(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in parameters.items()}
