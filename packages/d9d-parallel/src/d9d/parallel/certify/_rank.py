"""What one rank of a layout finds."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig, all_gather_objects

from .._loss import LossSum
from ._comparison import ALL_SHARES, Comparison, Quantity, ratio_and_error
from ._oracle import Oracle, OracleStep
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
    with DistContext.launch(mesh, "cpu") as context:
        for microbatches in subject.subject.microbatches:
            try:
                module = subject.build()
                if refusal := _parallelize(subject, module, context):
                    return refusal
                subject.initialize(module)
                compare = _Comparer(context=context, subject=subject.subject, microbatches=microbatches)
                found += _run(subject, module, oracle, context, compare)
            except Exception as error:
                error.add_note(f"while certifying {mesh} with {microbatches} microbatches a data rank")
                raise
    return found


def _parallelize(subject: LoadedSubject, module: nn.Module, context: DistContext) -> str:
    """Lay the module out; why that was refused, if it was."""
    refusal = ""
    try:
        subject.parallelize(module, context)
    except (ValueError, NotImplementedError) as error:
        refusal = str(error) or repr(error)
    refusals = all_gather_objects(refusal)
    if any(refusals) and not all(refusals):
        ranks = [rank for rank, reason in enumerate(refusals) if reason]
        raise RuntimeError(f"parallelize refused on ranks {ranks} and not on the others: {max(refusals)}")
    return refusal


@attrs.frozen(kw_only=True)
class _Comparer:
    """Compares on one rank, in one run."""

    context: DistContext
    subject: Subject
    microbatches: int

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
            step=step,
            ratio=ratio,
            error=error,
            limit=limit,
        )


def _run(
    subject: LoadedSubject, module: nn.Module, oracle: Oracle, context: DistContext, compare: _Comparer
) -> Iterator[Comparison]:
    before = list(_compare_start(compare, named_parameters(module), oracle))
    yield from before
    if any(all_gather_objects(any(not c.passed for c in before))):
        # All that follows would be wrong, or raise.
        return

    data = context.mesh("batch")
    rank, ranks = data.get_local_rank("dp"), data["dp"].size()
    count = ranks * compare.microbatches
    first, end = rank * compare.microbatches, (rank + 1) * compare.microbatches
    seen: list[LossSum] = []
    step = subject.loop(module, _recorded(subject.loss, seen), context)
    for number, (max_norm, expected) in enumerate(zip(subject.subject.max_norms, oracle.steps), start=1):
        result = step([subject.part(part, count) for part in range(first, end)], max_norm=max_norm)
        if number == 1:
            shares = oracle.shares[count]
            yield compare.one(Quantity.SHARE, 1, shares.sum(0), oracle.total, name=ALL_SHARES)
            share = shares[first:end].sum(0)
            yield compare.one(Quantity.SHARE, 1, _sum(seen, context), share, name=f"data rank {rank}")
        yield from _compare_step(compare, number, module, result, expected)


def _compare_start(compare: _Comparer, parameters: Mapping[str, nn.Parameter], oracle: Oracle) -> Iterator[Comparison]:
    _check_shapes(parameters, oracle)
    yield from compare.tensors(Quantity.INITIAL, 0, _whole(parameters), oracle.initial)
    for names in oracle.ties:
        is_tied = len({id(parameters[name]) for name in names}) == 1
        yield compare.verdict(Quantity.TIE, 0, " = ".join(names), 1.0, 0.0 if is_tied else math.inf, limit=0.0)


def _compare_step(
    compare: _Comparer, number: int, module: nn.Module, result: StepResult, expected: OracleStep
) -> Iterator[Comparison]:
    parameters = named_parameters(module)
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
    """Whether this rank sees the bits that the first rank sees; else they would drift apart."""
    flat = torch.cat([tensor.flatten() for tensor in parameters.values()])
    dist.broadcast(flat, src=0)
    firsts = flat.split([tensor.numel() for tensor in parameters.values()])
    for (name, tensor), first in zip(parameters.items(), firsts):
        ratio, error = ratio_and_error(tensor.flatten(), first)
        yield compare.verdict(Quantity.REPLICA, number, name, ratio, error, limit=0.0)


def _check_shapes(parameters: Mapping[str, nn.Parameter], oracle: Oracle) -> None:
    if parameters.keys() != oracle.initial.keys():
        raise RuntimeError(
            f"the layout has parameters {sorted(parameters.keys() - oracle.initial.keys())} that one process lacks, "
            f"and lacks {sorted(oracle.initial.keys() - parameters.keys())}"
        )
    for name, parameter in parameters.items():
        if parameter.shape != (shape := oracle.initial[name].shape):
            raise RuntimeError(
                f"{name} has the shape {tuple(parameter.shape)} in the layout and {tuple(shape)} in one process: what "
                "is split over ranks is to be a DTensor, or nobody can say what it is part of"
            )


def _recorded(loss: Callable[[nn.Module, Any], LossSum], seen: list[LossSum]) -> Callable[[nn.Module, Any], LossSum]:
    def recorded(module: nn.Module, batch: Any) -> LossSum:
        found = loss(module, batch)
        seen.append(found.detach())
        return found

    return recorded


def _sum(losses: Sequence[LossSum], context: DistContext) -> Tensor:
    """Loss and weight of this data rank."""
    total = torch.zeros(2, dtype=torch.float64)
    for loss in losses:
        total += torch.stack([whole(loss.sum).double(), whole(loss.weight).double()])
    dist.all_reduce(total, group=context.mesh("batch").get_group("cp"))
    return total


def _whole(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in parameters.items()}
