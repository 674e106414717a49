"""What a checkpoint of a run holds, and how a run goes on from one."""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor, nn

from d9d.ckpt import JSON, JobCheckpoint, JobCheckpoints

from ._protocols import Metric
from .optim import NamedStateOptimizer


@attrs.frozen(kw_only=True)
class RunState:
    """The parts of a run that change, to save together and to restore in place."""

    module: nn.Module
    """Parameters and persistent buffers."""

    optimizer: NamedStateOptimizer
    """All of its state."""

    metrics: Mapping[str, Metric]
    """What each rank has gathered since the last line of the log."""

    device: torch.device
    """Whose random state belongs to the run, next to the host's."""

    identity: Mapping[str, JSON]
    """What must not change within a run, such as the seed: a checkpoint of another value is refused."""

    def __attrs_post_init__(self) -> None:
        """Look at the state once, before the first step.

        Raises:
            TypeError: If an entry of the module's state is no tensor.
        """
        self._tensors()

    def save(self, checkpoints: JobCheckpoints, step: int, *, tokens: int) -> None:
        """Save everything after a step; collective.

        Args:
            checkpoints: Where to.
            step: Steps made.
            tokens: Tokens trained on in all steps.
        """
        checkpoints.save(
            step,
            self._tensors(),
            shared={"tokens": tokens, **self.identity},
            per_rank={**_random_state(self.device), **self._metric_state()},
        )

    def restore(self, checkpoint: JobCheckpoint) -> int:
        """Take everything back, in place; collective.

        Random state and metrics come back only where the number of ranks is the one that saved them; a metric, or a
        kind of device, that was not there then keeps its state.

        Returns:
            The tokens trained on.

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
        checkpoint.load(self._tensors())
        per_rank = checkpoint.per_rank()
        if per_rank is not None:
            tensors = {name: value for name, value in per_rank.items() if isinstance(value, Tensor)}
            _restore_random_state(tensors, self.device)
            for name, metric in self.metrics.items():
                prefix = f"metric.{name}."
                gathered = {k.removeprefix(prefix): value for k, value in tensors.items() if k.startswith(prefix)}
                if gathered:
                    metric.load_state_dict(gathered)
        tokens = saved["tokens"]
        assert isinstance(tokens, int)
        return tokens

    def _tensors(self) -> dict[str, Tensor]:
        model: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"the module's state {name!r} is a {type(value).__name__}; checkpoints of a run hold tensors: "
                    "make it a buffer"
                )
            if id(value) not in seen:  # tied parameters are one
                seen.add(id(value))
                model[f"model.{name}"] = value
        return model | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.named_state().items()}

    def _metric_state(self) -> dict[str, Tensor]:
        return {
            f"metric.{name}.{key}": value
            for name, metric in self.metrics.items()
            for key, value in metric.state_dict().items()
        }


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["random.cpu"])
    if device.type == "cuda" and "random.cuda" in state:
        torch.cuda.set_rng_state(state["random.cuda"], device)
