"""Topology, launch, collectives and initial weights of distributed PyTorch programs.

`MeshConfig` says the degrees of parallelism, `DistContext` joins the job and holds one `DeviceMesh` a domain. Test
worlds are in `d9d.mesh.testing`.
"""

from ._collectives import all_gather_objects, all_gather_ragged, broadcast_object, gather_objects
from ._config import MeshConfig
from ._context import DistContext, Timeouts
from ._domains import domain_shapes
from ._materialize import materialize

__all__ = [
    "DistContext",
    "MeshConfig",
    "Timeouts",
    "all_gather_objects",
    "all_gather_ragged",
    "broadcast_object",
    "domain_shapes",
    "gather_objects",
    "materialize",
]
