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
from ._norm import RMSNorm
from ._registry import Choice
from ._rotary import RotaryConfig, RotaryEmbedding, apply_rotary
from ._sdpa import TorchAttentionConfig

__all__ = [
    # Blocks
    "GroupedQueryAttention",
    "GroupedQueryAttentionConfig",
    "RMSNorm",
    "RotaryConfig",
    "RotaryEmbedding",
    "apply_rotary",
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
