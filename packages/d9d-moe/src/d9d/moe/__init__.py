"""Mixture of experts for PyTorch: routing, dispatch, grouped GEMM."""

from ._activation import ClampedSwiGLU, GatedActivation, PlainGatedActivation, SwiGLUActivation
from ._all_to_all import AllToAllDispatcher, AllToAllDispatcherConfig
from ._auxiliary import attach_auxiliary
from ._dispatch import (
    Arrived,
    Dispatched,
    Dispatcher,
    DispatcherConfig,
    DispatchNeed,
    PendingDispatch,
    dispatchers,
)
from ._expert_bias import update_expert_bias
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
from ._load import sum_expert_loads
from ._local import LocalDispatcher, LocalDispatcherConfig
from ._losses import AuxiliaryLoss, BalanceLoss, RoutedTokens, ZLoss
from ._registry import BackendConfig, Choice, Registry
from ._replay import record_routing, replay_routing
from ._router import Routing, Tape, TopKRouter
from ._scoring import Scoring, SelectedSoftmaxScoring, SigmoidScoring, SoftmaxScoring
from ._selection import ForcedBalance, GroupLimited, HighestScores, Selection
from ._sequences import Sequences
from ._swiglu import SwiGLU

__all__ = [
    # Layers
    "GroupedSwiGLU",
    "MoELayer",
    "SwiGLU",
    # Activations
    "ClampedSwiGLU",
    "GatedActivation",
    "PlainGatedActivation",
    "SwiGLUActivation",
    "silu_mul",
    "silu_mul_pair",
    # Routing
    "ForcedBalance",
    "GroupLimited",
    "HighestScores",
    "Routing",
    "Scoring",
    "SelectedSoftmaxScoring",
    "Selection",
    "SigmoidScoring",
    "SoftmaxScoring",
    "Tape",
    "TopKRouter",
    "record_routing",
    "replay_routing",
    # Balance
    "AuxiliaryLoss",
    "BalanceLoss",
    "RoutedTokens",
    "Sequences",
    "ZLoss",
    "attach_auxiliary",
    "sum_expert_loads",
    "update_expert_bias",
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
