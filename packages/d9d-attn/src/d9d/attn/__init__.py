"""Attention blocks and backends, rotary embeddings and norms for PyTorch."""

from ._backend import (
    AttentionBackend,
    AttentionBackendConfig,
    AttentionNeed,
    Capabilities,
    Feature,
    attention_backends,
)
from ._eager import EagerAttentionConfig
from ._grouped_query import GroupedQueryAttention, GroupedQueryAttentionConfig
from ._mask import AttentionMask, Documents, Visibility
from ._norm import RMSNorm, add_rms_norm, rms_norm
from ._norm_rotary import apply_rotary, norm_and_rotate
from ._registry import Choice
from ._rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryConfig,
    RotaryEmbedding,
    RotaryScaling,
    YarnScaling,
)
from ._sdpa import TorchAttentionConfig

__all__ = [
    # Blocks
    "GroupedQueryAttention",
    "GroupedQueryAttentionConfig",
    # Norms
    "RMSNorm",
    "add_rms_norm",
    "rms_norm",
    # Rotary positions
    "Llama3Scaling",
    "LinearScaling",
    "NTKScaling",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryScaling",
    "YarnScaling",
    "apply_rotary",
    "norm_and_rotate",
    # Masks
    "AttentionMask",
    "Documents",
    "Visibility",
    # Backends
    "AttentionBackend",
    "AttentionBackendConfig",
    "AttentionNeed",
    "Capabilities",
    "Choice",
    "EagerAttentionConfig",
    "Feature",
    "TorchAttentionConfig",
    "attention_backends",
]
