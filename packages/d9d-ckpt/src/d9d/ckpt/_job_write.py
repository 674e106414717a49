"""Job checkpoints, writing: each rank a file, then the manifest, then the name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import all_gather, rank_of, size_of, together
from ._files import TensorFileWriter, write_text
from ._json import JSON, check_json
from ._layout import Layout, gather_layout
from ._local import is_dtensor, local_part, require_data
from ._manifest import MANIFEST, Manifest, RankPart, Stored
from ._publish import published
from ._spec import Region, TensorSpec


@torch.no_grad()
def write_job_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    shared: Mapping[str, JSON],
    per_rank: Mapping[str, Tensor | JSON],
    group: ProcessGroup | None,
) -> None:
    """Writes one checkpoint. Collective; see `JobCheckpoints.save`."""
    with together(group):
        for state, path in ((shared, "shared"), (per_rank, "per_rank")):
            if not isinstance(state, Mapping):
                raise TypeError(f"{path} is a {type(state).__name__}: give values by name")
        own_tensors = {name: value for name, value in per_rank.items() if isinstance(value, Tensor)}
        own_values = {name: value for name, value in per_rank.items() if not isinstance(value, Tensor)}
        check_json(dict(shared), "shared")
        check_json({**own_values, **dict.fromkeys(own_tensors)}, "per_rank")
        require_data(own_tensors)
        for name, tensor in own_tensors.items():
            if is_dtensor(tensor):
                raise TypeError(f"per_rank[{name!r}] is a DTensor, which is no rank's own")
    layout = gather_layout(tensors, group)
    mine = _assign(layout, size_of(group))[rank_of(group)]
    file = f"rank-{rank_of(group):05d}.safetensors"
    with published(directory, group) as partial:
        with together(group):
            payload = {_shared(region.name): local_part(region.name, tensors[region.name])[0] for region in mine}
            payload |= {_own(name): tensor.detach() for name, tensor in own_tensors.items()}
            specs = {key: TensorSpec.of(tensor) for key, tensor in payload.items()}
            with TensorFileWriter(partial / file, specs) as writer:
                checksums = {key: writer.write(key, tensor) for key, tensor in payload.items()}
        share = [Stored(region, file, key := _shared(region.name), checksums[key]) for region in mine]
        part = RankPart(
            file=file,
            nbytes=writer.nbytes,
            tensors={
                name: Stored(Region.whole(name, specs[key := _own(name)]), file, key, checksums[key])
                for name in own_tensors
            },
            values=own_values,
        )
        shares, parts = zip(*all_gather((share, part), group))
        with together(group):
            if rank_of(group) == 0:
                stored: dict[str, list[Stored]] = {name: [] for name in layout.specs}
                for chunk in itertools.chain.from_iterable(shares):
                    stored[chunk.region.name].append(chunk)
                manifest = Manifest(step=step, shared=dict(shared), specs=layout.specs, stored=stored, ranks=parts)
                write_text(partial / MANIFEST, manifest.dumps())


def _shared(name: str) -> str:
    return f"shared/{name}"


def _own(name: str) -> str:
    return f"own/{name}"


def _assign(layout: Layout, ranks: int) -> list[list[Region]]:
    """The regions that each rank writes: each once, by the holder with fewest bytes so far."""
    regions: list[list[Region]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name, pieces in layout.pieces.items():
        for piece in pieces:
            writer = min(piece.holders, key=lambda rank: (load[rank], rank))
            regions[writer].append(piece.region)
            load[writer] += piece.region.numel * layout.specs[name].dtype.itemsize
    return regions
