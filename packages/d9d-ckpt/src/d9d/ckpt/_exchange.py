"""Sending pieces of tensors to the rank that needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ._collective import rank_of
from ._layout import Layout
from ._local import local_part
from ._spec import Region


@attrs.define(eq=False)
class Collection:
    """Regions on their way to one rank. What is sent or received must not be touched until `wait` returns."""

    regions: dict[Region, Tensor] = attrs.field(factory=dict)
    """On the CPU of the owner; elsewhere empty."""
    nbytes: int = 0
    """Memory that this rank holds for it."""
    _works: list[Work] = attrs.field(factory=list)
    _sent: list[Tensor] = attrs.field(factory=list)
    _received: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)

    def wait(self) -> Mapping[Region, Tensor]:
        """The regions, once all have come."""
        for work in self._works:
            work.wait()
        for values, place in self._received:
            place.copy_(values)
        self._works.clear()
        self._sent.clear()
        self._received.clear()
        return self.regions

    def place(self, region: Region, part: Region, dtype: torch.dtype) -> Tensor:
        """Where a part of a region belongs."""
        if region not in self.regions:
            self.regions[region] = torch.empty(region.shape, dtype=dtype)
            self.nbytes += self.regions[region].nbytes
        return self.regions[region][part.within(region)]

    def put(self, region: Region, part: Region, values: Tensor) -> None:
        """Puts what this rank has to its place."""
        if part == region:  # no copy where it is on the CPU
            self.regions[region] = values.cpu()
            self.nbytes += 0 if values.device.type == "cpu" else values.nbytes
        else:
            self.place(region, part, values.dtype).copy_(values)

    def send(self, values: Tensor, receiver: int, device: torch.device, group: ProcessGroup | None) -> None:
        """Sends a piece."""
        wire = _bytes_of(values.to(device).resolve_conj().resolve_neg().contiguous())
        self.nbytes += wire.numel()
        self._sent.append(wire)
        self._add(dist.isend(wire, group=group, group_dst=receiver))

    def receive(self, place: Tensor, sender: int, device: torch.device, group: ProcessGroup | None) -> None:
        """Receives a piece, straight into its place where the backend can write there."""
        values = place
        if place.device.type != device.type or not place.is_contiguous():
            values = torch.empty(place.shape, dtype=place.dtype, device=device)
            self.nbytes += values.nbytes
            self._received.append((values, place))
        self._add(dist.irecv(_bytes_of(values), group=group, group_src=sender))

    def _add(self, work: Work | None) -> None:
        assert work is not None, "this rank is in the group"
        self._works.append(work)


def _bytes_of(contiguous: Tensor) -> Tensor:
    """The memory of a tensor, in bytes as backends know few dtypes."""
    # a single element counts as contiguous whatever its stride, and is no view of bytes then
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def collect(
    needs: Sequence[Region], owner: int, *, layout: Layout, state: Mapping[str, Tensor], group: ProcessGroup | None
) -> Collection:
    """Starts to assemble regions on the CPU of one rank, the owner, from the pieces of all.

    Collective: all ranks must ask for the same regions in the same order, and wait for them in that order. Of several
    copies of a piece one is sent, none if the owner has it.
    """
    rank = rank_of(group)
    collection = Collection()
    for region in needs:
        for part, holders in _parts(region, layout):
            sender = owner if owner in holders else holders[owner % len(holders)]
            values: Tensor | None = None
            if rank == sender:
                local, held = local_part(region.name, state[region.name])
                values = local[part.within(held)]
            if rank != owner:
                if values is not None:
                    collection.send(values, owner, _wire_device(layout, group), group)
            elif values is not None:
                collection.put(region, part, values)
            else:
                place = collection.place(region, part, layout.specs[region.name].dtype)
                collection.receive(place, sender, _wire_device(layout, group), group)
    return collection


def _parts(region: Region, layout: Layout) -> Iterator[tuple[Region, tuple[int, ...]]]:
    """What of a region each piece has, and who holds it."""
    for piece in layout.pieces[region.name]:
        part = piece.region.intersect(region)
        if part is not None:
            yield part, piece.holders


def held_bytes(needs: Sequence[Region], layout: Layout) -> dict[int, int]:
    """How many bytes of regions each rank has."""
    held: dict[int, int] = {}
    for region in needs:
        for part, holders in _parts(region, layout):
            for rank in holders:
                held[rank] = held.get(rank, 0) + part.numel * layout.specs[region.name].dtype.itemsize
    return held


def _wire_device(layout: Layout, group: ProcessGroup | None) -> torch.device:
    """Where pieces are while they are sent: on the GPU if they live there or nothing else can be sent."""
    backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    over_nccl = "cuda:nccl" in backends and (layout.device_type == "cuda" or "cpu:" not in backends)
    return torch.device("cuda" if over_nccl else "cpu")
