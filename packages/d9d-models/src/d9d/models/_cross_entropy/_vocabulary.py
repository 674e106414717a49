"""A vocabulary that is split over ranks."""

import attrs
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@attrs.frozen
class VocabularyShard:
    """The classes whose weights this rank holds: its part of ``Shard(0)``, as DTensor and torch.chunk cut it."""

    group: ProcessGroup
    """The ranks that hold the vocabulary together; all of them have the same tokens."""

    total: int
    """Number of classes on all ranks."""

    @property
    def length(self) -> int:
        """Most classes that a rank holds."""
        return -(-self.total // self.group.size())

    @property
    def start(self) -> int:
        """The first class of this rank."""
        return min(self.total, self.length * self.group.rank())

    @property
    def held(self) -> int:
        """How many classes this rank holds; the last ranks may have fewer, or none."""
        return min(self.total - self.start, self.length)

    def sum_(self, values: Tensor) -> None:
        """Sum over the ranks, in place."""
        dist.all_reduce(values, group=self.group)

    def max_(self, values: Tensor) -> None:
        """Maximum over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
