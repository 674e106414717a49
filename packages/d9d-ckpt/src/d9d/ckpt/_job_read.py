"""Job checkpoints, reading: any layout from any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import all_gather, rank_of, size_of, together
from ._extent import Block, Check, Extent
from ._fill import Target
from ._header import Header, read_header
from ._json import JSON
from ._load import fill_targets
from ._local import local_part, require_tensors
from ._manifest import Manifest, Stored
from ._mapper import Group
from ._mappers import Identity
from ._names import natural_key, quote_with_nearest
from ._source import Source, read_extents
from ._spec import Region, TensorSpec
from ._stream import MEMORY_BUDGET, Progress


class JobSource(Source):
    """The tensors of a job checkpoint, put together from the chunks that ranks wrote.

    The first time that any of a chunk is read, all of it is, in small pieces, to compare its checksum: nothing comes
    out of a chunk that is not as it was written. From then on exactly what is wanted is read.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._headers: dict[str, Header] = {}
        self._blocks: dict[tuple[str, str], Block] = {}

    def __getitem__(self, name: str) -> TensorSpec:
        return self._manifest.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.specs)

    def __len__(self) -> int:
        return len(self._manifest.specs)

    def file(self, name: str) -> str:
        return ", ".join(sorted({stored.file for stored in self._manifest.stored[name]}, key=natural_key))

    def extents(self, region: Region) -> Sequence[Extent]:
        """As in `Source`.

        Raises:
            ValueError: A chunk is not what the manifest says.
        """
        found = []
        for stored in self._manifest.stored[region.name]:
            part = stored.region.intersect(region)
            if part is not None:
                block = self._block(stored, self[region.name].dtype)
                inner = tuple(start - base for start, base in zip(part.offset, stored.region.offset))
                found.append(Extent(block, Region(region.name, inner, part.shape), part.within(region)))
        return found

    def read(self, region: Region) -> Tensor:
        """The region, put together from chunks.

        Raises:
            ValueError: The region is not within the tensor, or a chunk differs from its checksum or from the manifest.
            ReadError: A file cannot be read.
        """
        return read_extents(region, self[region.name], self.extents(region))

    def chunk(self, name: str, stored: Stored) -> Tensor:
        """A stored chunk of any dtype, compared with its checksum."""
        block = self._block(stored, None)
        whole = Region.whole(name, block.spec)
        return read_extents(whole, block.spec, [Extent(block, whole, whole.slices)])

    def _block(self, stored: Stored, dtype: torch.dtype | None) -> Block:
        key = stored.file, stored.key
        if key not in self._blocks:
            if stored.file not in self._headers:
                self._headers[stored.file] = read_header(self._directory / stored.file)
            header = self._headers[stored.file]
            entry = header.entries.get(stored.key)
            expected = f"{list(stored.region.shape)}" if dtype is None else TensorSpec(stored.region.shape, dtype)
            if (
                entry is None
                or entry.spec.shape != stored.region.shape
                or entry.spec.dtype != (dtype or entry.spec.dtype)
            ):
                raise ValueError(
                    f"{stored.region.name!r} is damaged: {str(self._directory / stored.file)!r} has "
                    f"{'nothing' if entry is None else entry.spec} under {stored.key!r}, the manifest {expected}; "
                    "remove this checkpoint to go on from an earlier one"
                )
            path = self._directory / stored.file
            self._blocks[key] = Block(path, header.nbytes, entry.start, entry.spec, Check(stored.crc32))
        return self._blocks[key]


class JobCheckpoint:
    """A complete checkpoint of a job.

    Args:
        directory: Where it lies.
        group: The ranks that load it together.

    Raises:
        ValueError, OSError: It is broken.
    """

    def __init__(self, directory: Path, *, group: ProcessGroup | None = None) -> None:
        self.directory = directory
        self._group = group
        self._manifest = Manifest.read(directory)
        self._source = JobSource(directory, self._manifest)

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self._manifest.step

    @property
    def shared(self) -> Mapping[str, JSON]:
        """The state that is common to all ranks."""
        return self._manifest.shared

    @property
    def source(self) -> Source:
        """Its tensors under their global names, to load through a mapper or to look at."""
        return self._source

    @torch.no_grad()
    def load(
        self,
        tensors: Mapping[str, Tensor],
        *,
        memory_budget: int = MEMORY_BUDGET,
        progress: Progress | None = None,
    ) -> None:
        """Fills tensors or DTensors in place, whatever layout they were saved in. Collective.

        The names of all ranks together must be those that were saved: nothing is left out on either side.

        Args:
            tensors: This rank's, by global name.
            memory_budget: Bytes of buffers at once; see `load`.
            progress: Called with the bytes that this rank has got so far, and in all.

        Raises:
            ValueError: Names, shapes or dtypes differ (all are listed, nothing is written), or a chunk is damaged.
            ReadError: A file cannot be read.
            PeerError: Another rank failed.
        """
        asked = set[str]().union(*all_gather(list(tensors), self._group))
        with together(self._group):
            require_tensors(tensors)
            self._check(tensors, asked)
        with together(self._group):
            jobs: list[tuple[Group, Target]] = []
            for name, tensor in tensors.items():
                local, region = local_part(name, tensor)
                jobs.append((Group([name], [name], Identity()), Target(region, local.dtype, local)))
            fill_targets(self._source, jobs, memory_budget=memory_budget, progress=progress)

    def per_rank(self) -> dict[str, Tensor | JSON] | None:
        """What this rank gave as its own; None when another number of ranks saved it, as there is no such rank then.

        Raises:
            ValueError: A chunk is damaged.
        """
        if len(self._manifest.ranks) != size_of(self._group):
            return None
        own = self._manifest.ranks[rank_of(self._group)]
        return {**{name: self._source.chunk(name, stored) for name, stored in own.tensors.items()}, **own.values}

    def _check(self, tensors: Mapping[str, Tensor], asked: set[str]) -> None:
        missing, extra = asked - self._source.keys(), self._source.keys() - asked
        problems = [f"asked for, but not saved: {name}" for name in quote_with_nearest(missing, extra)]
        problems += [f"saved, but not asked for: {name}" for name in quote_with_nearest(extra, missing)]
        problems += [
            f"saved as {self._source[name]}, asked for as {TensorSpec.of(tensor)}: {name!r}"
            for name, tensor in tensors.items()
            if name in self._source and TensorSpec.of(tensor) != self._source[name]
        ]
        if problems:
            title = f"the checkpoint of step {self.step} has other tensors than are to be loaded:"
            raise ValueError("\n  ".join([title, *problems]))
