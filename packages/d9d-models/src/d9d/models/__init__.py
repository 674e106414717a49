"""White-box models: plain modules that read like the paper, their heads and losses, and their Hugging Face maps.

Each architecture is a subpackage: `d9d.models.qwen3_moe`.
"""

from ._classification import ClassificationOutput, SequenceClassificationHead, TokenClassificationHead
from ._cross_entropy._backend import (
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    LinearCrossEntropyNeed,
    LossCapabilities,
    linear_cross_entropy_backends,
)
from ._cross_entropy._cce import CutLinearCrossEntropyConfig
from ._cross_entropy._linear import linear_cross_entropy
from ._cross_entropy._tokens import TopK, token_cross_entropy, token_entropies, token_log_probs, top_k_log_probs
from ._cross_entropy._torch import TorchLinearCrossEntropyConfig
from ._cross_entropy._triton_config import TritonLinearCrossEntropyConfig
from ._cross_entropy._vocabulary import VocabularyShard
from ._embedding import EmbeddingHead, contrastive_loss
from ._language_modeling import (
    CausalLMContext,
    CausalLMOutput,
    HeadConfig,
    LanguageModelingHead,
    SegmentedLanguageModelingHead,
    SegmentedTokenEmbedding,
    TokenEmbedding,
)
from ._pooling import Pooling, pool

__all__ = [
    # Loss of a linear layer's output
    "CutLinearCrossEntropyConfig",
    "LinearCrossEntropy",
    "LinearCrossEntropyConfig",
    "LinearCrossEntropyNeed",
    "LossCapabilities",
    "TopK",
    "TorchLinearCrossEntropyConfig",
    "TritonLinearCrossEntropyConfig",
    "VocabularyShard",
    "linear_cross_entropy",
    "linear_cross_entropy_backends",
    "token_cross_entropy",
    "token_entropies",
    "token_log_probs",
    "top_k_log_probs",
    # Causal language models
    "CausalLMContext",
    "CausalLMOutput",
    "HeadConfig",
    "LanguageModelingHead",
    "SegmentedLanguageModelingHead",
    "SegmentedTokenEmbedding",
    "TokenEmbedding",
    # Other heads
    "ClassificationOutput",
    "EmbeddingHead",
    "Pooling",
    "SequenceClassificationHead",
    "TokenClassificationHead",
    "contrastive_loss",
    "pool",
]
