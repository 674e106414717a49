"""From the results of steps to the trackers."""

import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import attrs
from torch import Tensor

from d9d.mesh import DistContext
from d9d.parallel import LossSum

from ._batch_sum import sum_over_batch
from ._protocols import Metric
from .track import Number, Speedometer, Tracker

OWN_NUMBERS = frozenset(
    {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "nonfinite_steps",
        "seconds",
        "tokens_per_second",
        "mfu",
        "memory_gib",
    }
)
"""What a line holds whatever the task; metrics have other names."""


@attrs.frozen(kw_only=True)
class StepResult:
    """One step, equal on all ranks, in tensors that the device may not have computed yet."""

    total: LossSum
    """Summed loss and weight of the global batch, without a graph."""

    norm: Tensor
    """Norm of the gradient of the summed loss, before clipping."""

    lr: float
    """Learning rate of the first group."""


class RunLog:
    """Gives trackers the numbers of a step: loss, norm and rate of that step, speed since the line before.

    Args:
        trackers: Open ones on the main rank, none on the others.
        metrics: Of the task; each line holds what they gathered since the line before.
        speed: Running.
        ctx: Of this rank.
        step: Steps made so far.
        tokens: Tokens trained on so far.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        metrics: Mapping[str, Metric],
        speed: Speedometer,
        ctx: DistContext,
        step: int,
        tokens: Tensor,
    ) -> None:
        self._trackers, self._metrics, self._speed = trackers, metrics, speed
        self._total = functools.partial(sum_over_batch, ctx=ctx)
        self._step, self._tokens = step, int(tokens)

    def write(self, step: int, result: StepResult, *, tokens: Tensor, nonfinite_steps: Tensor) -> None:
        """Log a step; collective where the task has metrics. The main rank waits for its device.

        Args:
            step: Steps made so far.
            result: Of the last one.
            tokens: Tokens trained on so far.
            nonfinite_steps: Steps so far whose gradients were not finite.
        """
        gathered = {name: metric.compute(self._total) for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            metric.reset()
        if not self._trackers:
            return
        weight, all_tokens = result.total.weight.item(), int(tokens)
        numbers: dict[str, Number] = {
            "loss": result.total.mean().item(),
            "grad_norm": result.norm.item() / weight if weight else 0.0,
            "lr": result.lr,
            "tokens": all_tokens,
            "nonfinite_steps": int(nonfinite_steps),
            **self._speed.read(tokens=all_tokens - self._tokens, steps=step - self._step),
            **gathered,
        }
        self._step, self._tokens = step, all_tokens
        for tracker in self._trackers:
            tracker.log(step, numbers)

    @contextmanager
    def before_checkpoint(self) -> Generator[None]:
        """Make durable what was written, and leave the time of the body out of the speed."""
        with self._speed.paused():
            for tracker in self._trackers:
                tracker.flush()
            yield

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()
