"""Dims of meshes over which gradients are summed or split, and parameters by name, as norm and clipping take them."""

from collections.abc import Iterable
from typing import TypeAlias

import attrs
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

Parameters: TypeAlias = Iterable[nn.Parameter | tuple[str, nn.Parameter]]
"""As optimizers of torch take them: ``module.parameters()`` or ``module.named_parameters()``."""


def named(parameters: Parameters) -> list[tuple[str, nn.Parameter]]:
    """Every parameter with what an error may call it: its name in quotes, or its place."""
    return [
        (repr(item[0]), item[1]) if isinstance(item, tuple) else (f"parameter {place}", item)
        for place, item in enumerate(parameters)
    ]


@attrs.frozen
class MeshDims:
    """Some dims of a mesh; equal ones mean the same ranks in the same order."""

    mesh: DeviceMesh | None = None
    dims: tuple[int, ...] = ()

    @classmethod
    def larger_than_one(cls, mesh: DeviceMesh, dims: Iterable[int]) -> "MeshDims":
        """Those of some dims that have several ranks."""
        return cls(mesh, tuple(dim for dim in dims if mesh.size(dim) > 1))

    def groups(self) -> tuple[ProcessGroup, ...]:
        """One for each dim, to reduce over one after the other."""
        return tuple(self.mesh.get_group(dim) for dim in self.dims) if self.mesh else ()


def split_of_gradient(parameter: nn.Parameter, name: str) -> MeshDims:
    """Over which dims a parameter's gradient is split; the parameter where it has none, so that all ranks see the same.

    Raises:
        ValueError: The gradient is Partial.
    """
    tensor: Tensor = parameter if parameter.grad is None else parameter.grad
    if not isinstance(tensor, DTensor):
        return MeshDims()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"the gradient of {name} of shape {tuple(tensor.shape)} has placements {tensor.placements}: its addends "
            "are not summed yet; call GradientSync.finish() first"
        )
    # What is not Replicate splits the tensor: Shard and its strided kin, which are no subclasses of each other.
    split = (dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))
    return MeshDims.larger_than_one(tensor.device_mesh, split)
