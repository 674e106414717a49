"""Sending pieces of tensors to the rank that needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import rank_of
from ._layout import Layout
from ._local import local_part
from ._spec import Region


def collect(
    needs: Sequence[Region], layout: Layout, state: Mapping[str, Tensor], owner: int, group: ProcessGroup | None
) -> dict[Region, Tensor]:
    """Assembles regions on the CPU of one rank, the owner, from the pieces of all; elsewhere the result is empty.

    Collective: all ranks must ask for the same regions in the same order. One piece is in flight at a time, and of
    several copies of a piece one is sent, none if the owner has it.
    """
    rank = rank_of(group)
    collected: dict[Region, Tensor] = {}
    for region in needs:
        dtype = layout.specs[region.name].dtype
        for piece in layout.pieces[region.name]:
            part = piece.region.intersect(region)
            if part is None:
                continue
            sender = owner if owner in piece.holders else piece.holders[owner % len(piece.holders)]
            if rank not in (sender, owner):
                continue
            if rank == sender:
                local, held = local_part(region.name, state[region.name])
                values = local[part.within(held)]
            else:
                values = _receive(part.shape, dtype, sender, _wire_device(layout, group), group)
            if rank != owner:
                _send(values, owner, _wire_device(layout, group), group)
                continue
            if part == region:
                collected[region] = values.cpu()
            else:
                if region not in collected:
                    collected[region] = torch.empty(region.shape, dtype=dtype)
                collected[region][part.within(region)] = values
    return collected


def _send(values: Tensor, receiver: int, device: torch.device, group: ProcessGroup | None) -> None:
    # as bytes: backends know few dtypes
    wire = values.to(device).contiguous().reshape(-1).view(torch.uint8)
    dist.send(wire, group=group, group_dst=receiver)


def _receive(
    shape: Sequence[int], dtype: torch.dtype, sender: int, device: torch.device, group: ProcessGroup | None
) -> Tensor:
    values = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(values.reshape(-1).view(torch.uint8), group=group, group_src=sender)
    return values


def _wire_device(layout: Layout, group: ProcessGroup | None) -> torch.device:
    """Where pieces are while they are sent: on the GPU if they live there or nothing else can be sent."""
    backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    over_nccl = "cuda:nccl" in backends and (layout.device_type == "cuda" or "cpu:" not in backends)
    return torch.device("cuda" if over_nccl else "cpu")
