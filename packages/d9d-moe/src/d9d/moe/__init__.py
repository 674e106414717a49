"""Mixture of experts for PyTorch: routing, dispatch, grouped GEMM."""

from ._all_to_all import AllToAllDispatcher, AllToAllDispatcherConfig
from ._dispatch import (
    Dispatched,
    Dispatcher,
    DispatcherConfig,
    DispatchNeed,
    dispatchers,
)
from ._experts import GroupedSwiGLU
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
    # Dispatch
    "AllToAllDispatcher",
    "AllToAllDispatcherConfig",
    "DispatchNeed",
    "Dispatched",
    "Dispatcher",
    "DispatcherConfig",
    "LocalDispatcher",
    "LocalDispatcherConfig",
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
