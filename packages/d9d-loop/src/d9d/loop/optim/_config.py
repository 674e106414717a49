"""Optimizers as a choice in a config file."""

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import attrs
import torch
from attrs.validators import and_, deep_iterable, ge, lt
from torch import Tensor, nn

from .._choice import Choice
from ._adamw import AdamW
from ._groups import decay_groups


class NamedStateOptimizer(Protocol):
    """What the trainer asks of an optimizer: a `torch.optim.Optimizer` that has all of its state and names it."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Update the parameters from their gradients."""

    def named_state(self) -> Mapping[str, Tensor]:
        """All state by global name, DTensors for DTensor parameters; a checkpoint is loaded into it in place."""


@attrs.frozen(kw_only=True)
class OptimizerConfig(Choice, abc.ABC):
    """An optimizer that is yet to be given its parameters."""

    @abc.abstractmethod
    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> NamedStateOptimizer:
        """The optimizer of these parameters, which hold their initial values already."""


@attrs.frozen(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW; gains and biases (parameters of fewer than two dimensions) do not decay."""

    kind: ClassVar[str] = "adamw"

    lr: float = attrs.field(default=3e-4, validator=ge(0.0))
    """Learning rate, before the schedule's factor."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=deep_iterable(and_(ge(0.0), lt(1.0))))
    """Decay rates of the first and second moment."""

    eps: float = attrs.field(default=1e-8, validator=ge(0.0))
    """Added to the root of the second moment."""

    weight_decay: float = attrs.field(default=0.1, validator=ge(0.0))
    """Decoupled: a step shrinks the weight by lr · weight_decay."""

    moments: Literal["bfloat16", "float32", "float64"] | None = None
    """Storage of the moments; none: float32, or the parameter's dtype if wider."""

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> AdamW:
        """See `OptimizerConfig.build`."""
        return AdamW(
            decay_groups(named_parameters, self.weight_decay),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            moment_dtype=None if self.moments is None else getattr(torch, self.moments),
        )
