"""Job checkpoints, reading: any layout from any other."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import all_gather, rank_of, size_of, together
from ._files import TensorFile, raw_bytes
from ._json import JSON
from ._local import local_part
from ._manifest import Manifest, Stored
from ._names import quote_with_nearest
from ._source import Source
from ._spec import Region, TensorSpec


class JobSource(Source):
    """The tensors of a job checkpoint, assembled from the chunks that ranks wrote.

    A chunk is read whole, once, when any of it is asked for, to compare its checksum.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._files: dict[str, TensorFile] = {}
        self._verified: set[tuple[str, str]] = set()

    def __getitem__(self, name: str) -> TensorSpec:
        return self._manifest.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.specs)

    def __len__(self) -> int:
        return len(self._manifest.specs)

    def file(self, name: str) -> str:
        """The files of its chunks."""
        return ", ".join(dict.fromkeys(stored.file for stored in self._manifest.stored[name]))

    def read(self, region: Region) -> Tensor:
        """The region, assembled from chunks.

        Raises:
            ValueError: A chunk differs from its checksum or from the manifest.
        """
        values = torch.empty(region.shape, dtype=self[region.name].dtype)
        for stored in self._manifest.stored[region.name]:
            part = stored.region.intersect(region)
            if part is not None:
                values[part.within(region)] = self.chunk(stored)[part.within(stored.region)]
        return values

    def chunk(self, stored: Stored) -> Tensor:
        """A stored chunk, mapped, after a look at its checksum."""
        if stored.file not in self._files:
            self._files[stored.file] = TensorFile(self._directory / stored.file)
        tensor = self._files[stored.file].tensor(stored.key)
        if (stored.file, stored.key) not in self._verified:
            found = zlib.crc32(raw_bytes(tensor))
            if found != stored.crc32 or tensor.shape != stored.region.shape:
                raise ValueError(
                    f"{stored.region.name!r} is damaged: its data in {str(self._directory / stored.file)!r} "
                    f"has the checksum {found:#010x} and the shape {list(tensor.shape)}, not {stored.crc32:#010x} and "
                    f"{list(stored.region.shape)}; remove this checkpoint to go on from an earlier one"
                )
            self._verified.add((stored.file, stored.key))
        return tensor


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
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills tensors or DTensors in place, whatever layout they were saved in. Collective.

        The names of all ranks together must be those that were saved: nothing is left out on either side.

        Raises:
            ValueError: Names, shapes or dtypes differ (all are listed, nothing is written), or a chunk is damaged.
            PeerError: Another rank failed.
        """
        asked = set[str]().union(*all_gather(list(tensors), self._group))
        with together(self._group):
            self._check(tensors, asked)
        with together(self._group):
            for name, tensor in tensors.items():
                local, region = local_part(name, tensor)
                if region.numel:
                    local.copy_(self._source.read(region))

    def per_rank(self) -> dict[str, Tensor | JSON] | None:
        """What this rank gave as its own; None when another number of ranks saved it, as there is no such rank then.

        Raises:
            ValueError: A chunk is damaged.
        """
        if len(self._manifest.ranks) != size_of(self._group):
            return None
        own = self._manifest.ranks[rank_of(self._group)]
        return {**{name: self._source.chunk(stored).clone() for name, stored in own.tensors.items()}, **own.values}

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
