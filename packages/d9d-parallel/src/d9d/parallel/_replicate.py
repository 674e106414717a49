"""Data parallelism: every rank holds the whole module."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ._layout import Layout, lay_out


def parallelize_replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Hold every parameter of a module on every rank of a mesh, and have each rank see different data.

    Parameters become DTensors, replicated over all dims of ``mesh``; their gradients are Partial over all of them,
    to be summed by `GradientSync`. In ``forward`` the module sees plain local tensors. Parameters that are DTensors
    already (experts, say) are left alone. Values are those of the mesh's first rank; buffers stay as they are on
    each rank.

    Args:
        module: Changed in place; may be on ``meta``.
        mesh: Ranks that hold copies, of any number of dims.
    """
    replicated = Layout(mesh, (Replicate(),) * mesh.ndim, (Partial(),) * mesh.ndim)
    lay_out(module, lambda parameter: None if isinstance(parameter, DTensor) else replicated)
