"""Topology, launch, collectives and initial weights of distributed PyTorch programs.

`MeshConfig` says the degrees of parallelism, `DistContext` joins the job and holds one `DeviceMesh` a domain. Test
worlds are in `d9d.mesh.testing`.
"""

from ._config import MeshConfig
from ._context import DistContext, Timeouts
from ._domains import domain_shapes
from ._materialize import materialize
from ._objects import (
    all_gather_objects,
    all_gather_objects_async,
    broadcast_object,
    broadcast_object_async,
    gather_objects,
    gather_objects_async,
)
from ._pending import Pending
from ._ragged import (
    all_gather_ragged,
    all_gather_ragged_async,
    broadcast_ragged,
    broadcast_ragged_async,
    gather_ragged,
    gather_ragged_async,
)
from ._random import RandomState, seed_rank

__all__ = [
    # topology
    "DistContext",
    "MeshConfig",
    "Timeouts",
    "domain_shapes",
    # collectives
    "Pending",
    "all_gather_objects",
    "all_gather_objects_async",
    "all_gather_ragged",
    "all_gather_ragged_async",
    "broadcast_object",
    "broadcast_object_async",
    "broadcast_ragged",
    "broadcast_ragged_async",
    "gather_objects",
    "gather_objects_async",
    "gather_ragged",
    "gather_ragged_async",
    # weights and random numbers
    "RandomState",
    "materialize",
    "seed_rank",
]
