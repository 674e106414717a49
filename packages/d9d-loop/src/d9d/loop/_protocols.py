"""What the trainer asks of the user's code."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from d9d.ckpt import Mapper
from d9d.mesh import DistContext
from d9d.parallel import LossSum, StageInfo


class ModelProvider(Protocol):
    """Builds a model and lays it out on the meshes."""

    def build(self, stage: StageInfo) -> nn.Module:
        """The module of one stage; called under ``torch.device("meta")``.

        Each module that owns parameters or buffers has a `reset_parameters`, see `d9d.mesh.materialize`.
        """

    def parallelize(self, module: nn.Module, stage: StageInfo, ctx: DistContext) -> None:
        """Turn the parameters into DTensors, in place; they are on meta, in their final dtype."""

    def mapper(self, module: nn.Module) -> Mapper | None:
        """From a published checkpoint to the names of `module`; None where there is none."""

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of forward and backward for one token of a sequence of this length."""


class Metric(Protocol):
    """A number gathered over microbatches and ranks, between two lines of the log."""

    def compute(self, total: Callable[[Tensor], Tensor]) -> float:
        """The number, over all ranks; collective.

        Args:
            total: Sums a tensor over the ranks that hold different data.
        """

    def reset(self) -> None:
        """Forget what was gathered."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """What was gathered on this rank, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` gave."""


class Task(Protocol):
    """From a batch to the model's inputs, and from its outputs to a loss."""

    def inputs(self, batch: Any) -> tuple[Any, Any]:
        """The model's first and second argument, from a collated batch on the device.

        The second one, `shared`, goes to `loss` as well.
        """

    def loss(self, out: Any, shared: Any) -> LossSum:
        """The summed loss of a microbatch and its weight (the number of labels that count); neither is divided."""

    def metrics(self) -> Mapping[str, Metric]:
        """Further numbers for the log, by name; the same objects at each call, which `loss` feeds."""
