"""Collectives of tensors whose sizes other ranks do not know."""

import math

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._bytes import all_gather_bytes, broadcast_bytes, gather_bytes
from ._group import rank_in
from ._objects import all_gather_objects, broadcast_object
from ._pending import Pending


def all_gather_ragged(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Tensors that differ in the size of dim 0, one a rank, in rank order, on every rank.

    Args:
        tensor: Of any dtype and any size of dim 0, zero too, contiguous or not; the other dims, the dtype and the kind
            of device are those of the other ranks. No gradient flows back.
        group: Every rank of it must call this; ``None`` for the default one.

    Raises:
        ValueError: On every rank, if a tensor has no dims, or they differ in more than dim 0. Also if this rank is not
            in the group.
    """
    return all_gather_ragged_async(tensor, group).wait()


def all_gather_ragged_async(tensor: Tensor, group: ProcessGroup | None = None) -> Pending[list[Tensor]]:
    """As `all_gather_ragged`; returns once shapes are exchanged, and data travels while the caller goes on."""
    specs = _exchange_specs(tensor, group)
    return all_gather_bytes(
        _as_bytes(tensor),
        [spec.nbytes for spec in specs],
        group=group,
        result=lambda found: [spec.tensor(part) for spec, part in zip(specs, found)],
    )


def gather_ragged(tensor: Tensor, group: ProcessGroup | None = None, *, group_dst: int = 0) -> list[Tensor] | None:
    """As `all_gather_ragged`, on one rank; ``None`` on the others.

    Args:
        tensor: As there.
        group: As there.
        group_dst: Who gets the tensors, by its rank in the group.

    Raises:
        ValueError: As there.
    """
    return gather_ragged_async(tensor, group, group_dst=group_dst).wait()


def gather_ragged_async(
    tensor: Tensor, group: ProcessGroup | None = None, *, group_dst: int = 0
) -> Pending[list[Tensor] | None]:
    """As `gather_ragged`; returns once shapes are exchanged, and data travels while the caller goes on."""
    rank_in(group, group_dst)
    specs = _exchange_specs(tensor, group)
    return gather_bytes(
        _as_bytes(tensor),
        [spec.nbytes for spec in specs],
        group=group,
        group_dst=group_dst,
        result=lambda found: [spec.tensor(part) for spec, part in zip(specs, found)],
    )


def broadcast_ragged(tensor: Tensor | None, group: ProcessGroup | None = None, *, group_src: int = 0) -> Tensor:
    """The tensor of one rank, on every rank, which need not know its shape and dtype.

    Args:
        tensor: On the source, any one; what other ranks pass is not looked at. No gradient flows back.
        group: Every rank of it must call this; ``None`` for the default one.
        group_src: The source, by its rank in the group.

    Returns:
        On the source the tensor itself; elsewhere one on the same kind of device.

    Raises:
        ValueError: On every rank, if the source passes ``None``. Also if this rank or the source is not in the group.
    """
    return broadcast_ragged_async(tensor, group, group_src=group_src).wait()


def broadcast_ragged_async(
    tensor: Tensor | None, group: ProcessGroup | None = None, *, group_src: int = 0
) -> Pending[Tensor]:
    """As `broadcast_ragged`; returns once the shape is known, and data travels while the caller goes on."""
    source = tensor if rank_in(group, group_src) == group_src else None
    spec = broadcast_object(None if source is None else _Spec.of(source), group, group_src=group_src)
    if spec is None:
        raise ValueError(f"rank {group_src} of the group is to broadcast a tensor, and passed None")
    payload = None if source is None else _as_bytes(source)
    return broadcast_bytes(
        payload,
        spec.nbytes,
        device=spec.device if source is None else source.device,
        group=group,
        group_src=group_src,
        result=lambda received: spec.tensor(received) if source is None else source,
    )


@attrs.frozen
class _Spec:
    """What the other ranks need to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> "_Spec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """This rank's device of that kind."""
        return torch.device(self.device_type)

    def goes_with(self, other: "_Spec") -> bool:
        return bool(self.shape) and attrs.evolve(self, shape=(0, *self.shape[1:])) == attrs.evolve(
            other, shape=(0, *other.shape[1:])
        )

    def tensor(self, data: Tensor) -> Tensor:
        return data.view(self.dtype).view(self.shape)


def _exchange_specs(tensor: Tensor, group: ProcessGroup | None) -> list[_Spec]:
    specs = all_gather_objects(_Spec.of(tensor), group)
    if not all(spec.goes_with(specs[0]) for spec in specs):
        held = ", ".join(f"{list(spec.shape)} {spec.dtype} on {spec.device_type}" for spec in specs)
        raise ValueError(
            f"a ragged gather takes tensors that have a dim 0 and differ in its size only; the ranks hold {held}"
        )
    return specs


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
