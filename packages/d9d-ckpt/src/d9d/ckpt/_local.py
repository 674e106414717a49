"""The part of a tensor that this rank holds: the only place that reads placements of DTensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from ._spec import Region

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor; does not import their module, which takes up to 1.7 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def require_dense(tensors: Mapping[str, Tensor]) -> None:
    """Raises a ValueError that lists the tensors whose elements do not each have a place in memory."""
    sparse = [name for name, tensor in tensors.items() if tensor.layout is not torch.strided]
    if sparse:
        raise ValueError(f"tensors of a sparse layout are neither read nor written, call `to_dense` first: {sparse!r}")


def require_data(tensors: Mapping[str, Tensor]) -> None:
    """Raises a ValueError that lists the tensors on meta, or else sparse ones: they cannot be written."""
    absent = [name for name, tensor in tensors.items() if tensor.is_meta]
    if absent:
        raise ValueError(f"tensors on meta have no data to write: {absent!r}")
    require_dense(tensors)


def require_tensors(state: Mapping[str, Tensor]) -> None:
    """Raises a TypeError that names what is no tensor, as of a module or the state of an optimizer, or no name."""
    if not isinstance(state, Mapping):
        raise TypeError(f"tensors by name are needed, got a {type(state).__name__}: give its state_dict()")
    others = [f"{name!r} is a {type(value).__name__}" for name, value in state.items() if not isinstance(value, Tensor)]
    others += [f"the name {name!r} is no string" for name in state if not isinstance(name, str)]
    if others:
        raise TypeError(f"tensors by name are needed, but {', '.join(others)}")


def local_part(name: str, tensor: Tensor) -> tuple[Tensor, Region]:
    """What this rank holds of the tensor called `name`, sharing its memory, and which region of it that is."""
    if not is_dtensor(tensor):
        return tensor.detach(), Region(name, (0,) * tensor.ndim, tensor.shape)
    try:
        offset, shape = local_region(tensor)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
    # Not detached first: DTensor plans each operator anew for every shape and layout, which is slow.
    return tensor.to_local().detach(), Region(name, offset, shape)


def local_region(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of this rank's part of the global tensor.

    The part is empty on ranks outside of the tensor's mesh, and where there are fewer slices than ranks.

    Raises:
        ValueError: The part is no rectangle (strided shards of uneven length), or the tensor is a partial sum.
    """
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415  # loaded already, by whoever made the tensor
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return (0,) * tensor.ndim, (0,) * tensor.ndim
    # follow each dim's indices through the same splits as the data
    indices = [torch.arange(length) for length in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        size, rank = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        match placement:
            case Replicate():
                pass
            case _StridedShard():
                parts = _split(indices[placement.dim], int(placement.split_factor))
                indices[placement.dim] = torch.cat([_split(part, size)[rank] for part in parts])
            case Shard():
                indices[placement.dim] = _split(indices[placement.dim], size)[rank]
            case _:
                raise ValueError(f"cannot save or load a tensor that is {placement!r}: reduce it first")
    if any(len(held) and int(held[-1] - held[0]) != len(held) - 1 for held in indices):
        raise ValueError(
            f"placements {tensor.placements} leave rank {coordinate} of the mesh no rectangle of {list(tensor.shape)}"
        )
    return tuple(int(held[0]) if len(held) else 0 for held in indices), tuple(map(len, indices))


def _split(indices: Tensor, count: int) -> list[Tensor]:
    """As torch.chunk, with empty parts where that returns fewer than `count`."""
    step = max(1, -(-len(indices) // count))
    return [indices[start * step : (start + 1) * step] for start in range(count)]
