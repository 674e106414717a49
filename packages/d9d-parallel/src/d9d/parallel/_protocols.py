"""What parallelism asks of a module, by structure: implement it without importing it."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed import ProcessGroup


@runtime_checkable
class SupportsExpertParallel(Protocol):
    """A mixture of experts whose experts can live on different ranks."""

    @property
    def num_experts(self) -> int:
        """Experts in the whole model."""

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters whose dim 0 counts experts."""

    def set_expert_group(self, group: ProcessGroup, *, dispatcher: str | None = None) -> None:
        """Exchange tokens over ``group``, whose rank r holds the r-th of equal contiguous blocks of experts."""
