"""Attention blocks and backends, rotary embeddings and norms for PyTorch."""

from ._backend import (
    AttentionBackend,
    AttentionBackendConfig,
    AttentionBackendWithLSE,
    AttentionNeed,
    Capabilities,
    attention_backends,
)
from ._eager import EagerAttentionConfig
from ._feature import Feature
from ._flash_2 import FlashAttention2Config
from ._flash_4 import FlashAttention4Config
from ._flex import FlexAttentionConfig
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
from ._table import capability_table

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
    "AttentionBackendWithLSE",
    "AttentionNeed",
    "Capabilities",
    "Choice",
    "EagerAttentionConfig",
    "Feature",
    "FlashAttention2Config",
    "FlashAttention4Config",
    "FlexAttentionConfig",
    "TorchAttentionConfig",
    "attention_backends",
    "capability_table",
]
