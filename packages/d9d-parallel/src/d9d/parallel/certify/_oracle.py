"""What one process computes from the whole batch: plain autograd, no part of this package."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from ._protocols import Optimizer
from ._subject import LoadedSubject, Subject, named_parameters, ties


@attrs.frozen(kw_only=True)
class OracleStep:
    """One step."""

    weight: Tensor
    loss: Tensor
    """The mean."""
    norm: Tensor
    """Of the mean's gradient."""
    gradients: Mapping[str, Tensor]
    """Clipped; zeros for trained parameters that the loss does not reach."""
    parameters: Mapping[str, Tensor]
    """After the step."""


@attrs.frozen(kw_only=True)
class Oracle:
    """The truth about a subject."""

    initial: Mapping[str, Tensor]
    """Parameters before the first step."""
    ties: Sequence[Sequence[str]]
    """Names that mean one parameter."""
    total: Tensor
    """Loss and weight of the whole batch before the first step."""
    shares: Mapping[int, Tensor]
    """The same for each part, by the number of parts, as (parts, 2)."""
    steps: Sequence[OracleStep]


def compute(subject: Subject, counts: Sequence[int]) -> Oracle:
    """Train in one process.

    Args:
        subject: What to train.
        counts: Numbers of parts into which the layouts will split the batch.
    """
    loaded = subject.load()
    module = loaded.build()
    loaded.initialize(module)
    parameters = named_parameters(module)
    initial = _copy(parameters)
    with torch.no_grad():
        total = _loss_and_weight(loaded, module, loaded.batch)
        shares = {
            count: torch.stack([_loss_and_weight(loaded, module, loaded.part(i, count)) for i in range(count)])
            for count in counts
        }
    optimizer = loaded.optimizer(module.parameters())
    steps = [_step(loaded, module, optimizer, max_norm) for max_norm in subject.max_norms]
    return Oracle(initial=initial, ties=ties(parameters), total=total, shares=shares, steps=steps)


def _step(subject: LoadedSubject, module: nn.Module, optimizer: Optimizer, max_norm: float | None) -> OracleStep:
    trained = [p for p in module.parameters() if p.requires_grad]
    module.zero_grad()
    loss = subject.loss(module, subject.batch)
    # Not of the mean: what modules add to the backward pass by themselves, as auxiliary losses, is a sum too.
    torch.autograd.backward(loss.sum)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / loss.weight
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))
    if max_norm is not None and norm > max_norm:
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad *= max_norm / norm
    gradients = {name: p.grad.clone() for name, p in named_parameters(module).items() if p.grad is not None}
    optimizer.step()
    return OracleStep(
        weight=loss.weight,
        loss=(loss.sum / loss.weight).detach(),
        norm=norm,
        gradients=gradients,
        parameters=_copy(named_parameters(module)),
    )


def _loss_and_weight(subject: LoadedSubject, module: nn.Module, batch: object) -> Tensor:
    loss = subject.loss(module, batch)
    return torch.stack([loss.sum.double(), loss.weight.double()])


def _copy(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
