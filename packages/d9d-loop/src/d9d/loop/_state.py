"""What a checkpoint of a run holds, and how a run goes on from one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
import torch
from torch import Tensor, nn

from d9d.ckpt import JSON, JobCheckpoint, JobCheckpoints
from d9d.mesh import RandomState

from ._protocols import Metric
from .optim import NamedStateOptimizer

V = TypeVar("V")


@attrs.frozen(kw_only=True)
class RunState:
    """The parts of a run that change, to save together and to restore in place."""

    modules: Sequence[nn.Module]
    """Parameters and persistent buffers: this rank's stages."""

    copies: Mapping[str, str]
    """Names of tied parameters of this rank that stand for one of another stage, and that one's name."""

    optimizer: NamedStateOptimizer
    """All of its state."""

    metrics: Mapping[str, Metric]
    """What each rank has gathered since the last line of the log."""

    random: RandomState
    """The streams of each rank."""

    identity: Mapping[str, JSON]
    """What must not change within a run, such as the seed: a checkpoint of another value is refused."""

    def __attrs_post_init__(self) -> None:
        """Look at the state once, before the first step.

        Raises:
            TypeError: If an entry of the module's state is no tensor.
        """
        self._tensors()

    def save(self, checkpoints: JobCheckpoints, step: int, *, counters: Mapping[str, int]) -> None:
        """Save everything after a step; collective.

        Args:
            checkpoints: Where to.
            step: Steps made.
            counters: Numbers of all steps, equal on all ranks.
        """
        checkpoints.save(
            step,
            self._tensors(),
            shared={"counters": dict(counters), **self.identity},
            per_rank={**_prefixed("random", self.random.state_dict()), **self._metric_state()},
        )

    def restore(self, checkpoint: JobCheckpoint) -> dict[str, int]:
        """Take everything back, in place; collective.

        Random state and metrics come back only where the number of ranks is the one that saved them; a metric, or a
        random stream, that was not there then keeps its state.

        Returns:
            The counters.

        Raises:
            ValueError: If the checkpoint is of a run with another identity.
        """
        saved = checkpoint.shared
        differing = [name for name, value in self.identity.items() if saved.get(name) != value]
        if differing:
            changes = ", ".join(f"{name}={saved.get(name)!r} is now {self.identity[name]!r}" for name in differing)
            raise ValueError(
                f"the checkpoint of step {checkpoint.step!r} belongs to another run: {changes}; "
                "restore the old values, or start in another directory"
            )
        tensors = self._tensors()
        checkpoint.load(tensors)
        for name, tensor in self._named_tensors():
            if tensor is not tensors[name]:
                with torch.no_grad():
                    tensor.copy_(tensors[name])
        per_rank = checkpoint.per_rank()
        if per_rank is not None:
            self.random.load_state_dict(_without_prefix("random", per_rank))
            for name, metric in self.metrics.items():
                gathered = _without_prefix(_metric_prefix(name), per_rank)
                if gathered:
                    metric.load_state_dict({key: value for key, value in gathered.items() if isinstance(value, Tensor)})
        counters = saved["counters"]
        assert isinstance(counters, Mapping)
        return {name: count for name, count in counters.items() if isinstance(count, int)}

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of this rank; where it holds several copies of one, the first."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._named_tensors():
            tensors.setdefault(name, tensor)
        return tensors

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of this rank by the name that they have in the whole model."""
        seen: set[int] = set()
        for module in self.modules:
            for name, value in module.state_dict(keep_vars=True).items():
                if not isinstance(value, Tensor):
                    raise TypeError(
                        f"the module's state {name!r} is a {type(value).__name__}; checkpoints of a run hold tensors: "
                        "make it a buffer"
                    )
                if id(value) not in seen:  # parameters that are tied within a stage are one
                    seen.add(id(value))
                    yield f"model.{self.copies.get(name, name)}", value
        for name, value in self.optimizer.named_state().items():
            parameter, dot, entry = name.rpartition(".")
            yield f"optimizer.{self.copies.get(parameter, parameter)}{dot}{entry}", value

    def _metric_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, metric in self.metrics.items():
            state |= _prefixed(_metric_prefix(name), metric.state_dict())
        return state


def _metric_prefix(name: str) -> str:
    """In quotes: one metric may be called as another one with a dot and more."""
    return f"metric.{json.dumps(name)}"


def _prefixed(prefix: str, state: Mapping[str, V]) -> dict[str, V]:
    return {f"{prefix}.{name}": value for name, value in state.items()}


def _without_prefix(prefix: str, state: Mapping[str, V]) -> dict[str, V]:
    """The part of a state that has a prefix."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
