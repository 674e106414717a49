"""The microbatches of one data rank."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from ._order import SampleOrder

Sample_co = TypeVar("Sample_co", covariant=True)

Collate = Callable[[Sequence[Any]], Any]
"""Makes a batch (any pytree) of samples."""


class SizedDataset(Protocol[Sample_co]):
    """A map-style data set, such as a list or a `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Sample_co:
        """One sample; the same one for the same index on every rank and in every run."""


@attrs.frozen(kw_only=True)
class Batches:
    """What one of several data ranks trains on at each step.

    Step s takes positions s·G … (s+1)·G − 1 of the order, G being the global batch. Rank r takes the r-th contiguous
    block of them, microbatch by microbatch. Which samples make a step depends on neither ranks nor microbatch, and
    the place to resume from is the step alone.

    Raises:
        ValueError: If ranks times microbatch does not divide the global batch.
    """

    dataset: SizedDataset[Any]
    """Holds the samples."""

    collate: Collate
    """Makes a microbatch of its samples."""

    order: SampleOrder
    """Which sample stands where."""

    global_batch: int
    """Samples of one step, over all data ranks."""

    microbatch: int
    """Samples of one forward pass on one rank."""

    rank: int = 0
    """This data rank."""

    ranks: int = 1
    """Data ranks in all."""

    def __attrs_post_init__(self) -> None:
        unit = self.ranks * self.microbatch
        if unit < 1 or self.global_batch < 1 or self.global_batch % unit:
            below = self.global_batch - self.global_batch % unit if unit > 0 else 0
            raise ValueError(
                f"global_batch={self.global_batch!r} does not divide into {self.ranks!r} data ranks × "
                f"microbatch={self.microbatch!r}; set global_batch to a positive multiple of {unit!r}, such as "
                f"{below or unit!r}, or change microbatch or the degrees of the mesh"
            )

    @property
    def accumulation(self) -> int:
        """Microbatches of one step on one rank."""
        return self.global_batch // (self.ranks * self.microbatch)

    def indices(self, step: int) -> list[list[int]]:
        """The sample indices of this rank's microbatches of a step, counted from 0."""
        first = step * self.global_batch + self.rank * self.accumulation * self.microbatch
        starts = range(first, first + self.accumulation * self.microbatch, self.microbatch)
        return [[self.order[position] for position in range(start, start + self.microbatch)] for start in starts]

    def step(self, step: int) -> Iterator[Any]:
        """This rank's collated microbatches of a step, counted from 0, each made when asked for."""
        for indices in self.indices(step):
            yield self.collate([self.dataset[index] for index in indices])
