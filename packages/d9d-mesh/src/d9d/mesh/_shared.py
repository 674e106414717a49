"""Meshes that live as long as the default process group.

torch takes meshes of one shape and names for equal, and what it caches for a DTensor of one leads to the groups of
that one: if they were destroyed while the default group goes on, an equal mesh would break at its first collective.
Keeping a new set for every launch is no way either, since gloo runs threads for every group. So equal meshes are one.
"""

from collections.abc import Mapping

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute


@attrs.define
class _Shared:
    world: ProcessGroup | None = None
    """The default group that the meshes belong to."""
    meshes: dict[tuple[str, tuple[tuple[str, int], ...]], DeviceMesh] = attrs.field(factory=dict)


_shared = _Shared()


def shared_mesh(device_type: str, dims: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks with these dims, slowest first, made when first asked for; collective."""
    if _shared.world is not dist.group.WORLD:
        forget_meshes()
        _shared.world = dist.group.WORLD
    key = device_type, tuple(dims.items())
    if key not in _shared.meshes:
        _shared.meshes[key] = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    return _shared.meshes[key]


def forget_meshes() -> None:
    """Let go of the meshes of a default group that is gone, and have torch do so.

    It numbers groups from 0 again: what it remembers of a mesh would lead an equal one to any group of the next job.
    And it would keep the old groups alive, with threads that poll.
    """
    _shared.world = None
    for mesh in _shared.meshes.values():
        # torch 2.11 never lets go of a mesh that an operation saw.
        mesh._pg_registry.clear()  # noqa: SLF001
    _shared.meshes.clear()
    # There is no public way. What torch.distributed.tensor.debug has takes numpy on torch 2.11.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # noqa: SLF001
    torch._C._clear_DTensor_sharding_propagator_cache()  # noqa: SLF001
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
