"""White-box models: plain modules that read like the paper, their heads and losses, and their Hugging Face maps.

Each architecture is a subpackage: `d9d.models.qwen3_moe`.
"""

from ._language_modeling import CausalLMContext, CausalLMOutput, LanguageModelingHead, TokenEmbedding
from ._linear_cross_entropy import linear_cross_entropy

__all__ = [
    "CausalLMContext",
    "CausalLMOutput",
    "LanguageModelingHead",
    "TokenEmbedding",
    "linear_cross_entropy",
]
