"""Mixture of experts for PyTorch: routing, dispatch, grouped GEMM."""

from ._all_to_all import AllToAllDispatcher, AllToAllDispatcherConfig
from ._dispatch import (
    Arrived,
    Dispatched,
    Dispatcher,
    DispatcherConfig,
    DispatchNeed,
    PendingDispatch,
    dispatchers,
)
from ._experts import GroupedSwiGLU
from ._gated import silu_mul, silu_mul_pair
from ._grouped_mm import (
    Capabilities,
    EagerGroupedMMConfig,
    GroupedMM,
    GroupedMMConfig,
    GroupedMMNeed,
    TorchGroupedMMConfig,
    grouped_mm_backends,
)
from ._layer import MoELayer
from ._local import LocalDispatcher, LocalDispatcherConfig
from ._registry import BackendConfig, Choice, Registry
from ._router import Routing, TopKRouter
from ._swiglu import SwiGLU

__all__ = [
    # Layers
    "GroupedSwiGLU",
    "MoELayer",
    "Routing",
    "SwiGLU",
    "TopKRouter",
    "silu_mul",
    "silu_mul_pair",
    # Dispatch
    "AllToAllDispatcher",
    "AllToAllDispatcherConfig",
    "Arrived",
    "DispatchNeed",
    "Dispatched",
    "Dispatcher",
    "DispatcherConfig",
    "LocalDispatcher",
    "LocalDispatcherConfig",
    "PendingDispatch",
    "dispatchers",
    # Grouped matrix product
    "Capabilities",
    "EagerGroupedMMConfig",
    "GroupedMM",
    "GroupedMMConfig",
    "GroupedMMNeed",
    "TorchGroupedMMConfig",
    "grouped_mm_backends",
    # Choice of either
    "BackendConfig",
    "Choice",
    "Registry",
]
