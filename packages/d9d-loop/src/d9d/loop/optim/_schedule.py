"""Learning rates as pure functions of the step."""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import attrs
from attrs.validators import ge, le

from .._choice import Choice


@attrs.frozen(kw_only=True)
class Schedule(Choice, abc.ABC):
    """The course of the learning rate, relative to the rate that the optimizer was built with."""

    @abc.abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """What the rate is multiplied by in one step.

        Args:
            step: The step about to be made, counted from 0.
            steps: Steps of the whole run.
        """


def _warmup() -> Any:
    return attrs.field(default=0, validator=ge(0))


def _final() -> Any:
    return attrs.field(default=0.1, validator=[ge(0.0), le(1.0)])


@attrs.frozen(kw_only=True)
class ConstantSchedule(Schedule):
    """A linear warm-up, then the full rate."""

    kind: ClassVar[str] = "constant"

    warmup: int = _warmup()
    """Steps of the linear rise: the first step has 1/warmup of the rate, the last all of it."""

    def factor(self, step: int, steps: int) -> float:
        """See `Schedule.factor`."""
        return _after_warmup(step, steps, self.warmup, lambda _: 1.0)


@attrs.frozen(kw_only=True)
class LinearSchedule(Schedule):
    """A linear warm-up, then a linear decay."""

    kind: ClassVar[str] = "linear"

    warmup: int = _warmup()
    """Steps of the linear rise: the first step has 1/warmup of the rate, the last all of it."""

    final: float = _final()
    """The factor that the decay reaches where the run ends."""

    def factor(self, step: int, steps: int) -> float:
        """See `Schedule.factor`."""
        return _after_warmup(step, steps, self.warmup, lambda done: 1.0 - (1.0 - self.final) * done)


@attrs.frozen(kw_only=True)
class CosineSchedule(Schedule):
    """A linear warm-up, then half a cosine period down (Loshchilov and Hutter, "SGDR", 2017, without restarts)."""

    kind: ClassVar[str] = "cosine"

    warmup: int = _warmup()
    """Steps of the linear rise: the first step has 1/warmup of the rate, the last all of it."""

    final: float = _final()
    """The factor that the decay reaches where the run ends."""

    def factor(self, step: int, steps: int) -> float:
        """See `Schedule.factor`."""
        final = self.final
        return _after_warmup(
            step, steps, self.warmup, lambda done: final + (1.0 - final) * (1.0 + math.cos(math.pi * done)) / 2
        )


class HasGroups(Protocol):
    """A `torch.optim.Optimizer`, as far as its learning rate goes."""

    param_groups: list[dict[str, Any]]


def set_learning_rate(optimizer: HasGroups, factor: float) -> float:
    """Give each group `factor` times the rate it was built with (kept as ``initial_lr``, as torch's schedulers do).

    Returns:
        The rate of the first group, for the log.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def _after_warmup(step: int, steps: int, warmup: int, decay: Callable[[float], float]) -> float:
    """A linear rise, then `decay` of the part that is done of the steps after it: from 0 to 1 where the run ends."""
    if step < warmup:
        return (step + 1) / warmup
    return decay(min(1.0, (step - warmup) / max(1, steps - warmup)))
