"""A vocabulary that is split over ranks."""

from typing import Any

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

    @classmethod
    def of(cls, group_name: str | None, total: int) -> "VocabularyShard | None":
        """As operators get it, whose arguments are plain values: what `plain` gave."""
        if group_name is None:
            return None
        group_of: Any = dist.distributed_c10d._resolve_process_group  # noqa: SLF001 - as functional collectives do
        return cls(group_of(group_name), total)

    def sum_(self, values: Tensor) -> None:
        """Sum over the ranks, in place."""
        dist.all_reduce(values, group=self.group)

    def max_(self, values: Tensor) -> None:
        """Maximum over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)


def plain(shard: VocabularyShard | None) -> tuple[str | None, int]:
    """The name of the group, if the vocabulary is split, and the number of classes; for `VocabularyShard.of`."""
    return (None, 0) if shard is None else (shard.group.group_name, shard.total)
