"""Qwen3 mixture-of-experts (Qwen3 Technical Report, arXiv:2505.09388)."""

from ._config import Qwen3MoEConfig
from ._hugging_face import config_from_hugging_face, config_to_hugging_face, mapper_from_hugging_face
from ._layout import parallelize_qwen3_moe
from ._model import Qwen3MoEForCausalLM, Qwen3MoELayer

__all__ = [
    "Qwen3MoEConfig",
    "Qwen3MoEForCausalLM",
    "Qwen3MoELayer",
    "config_from_hugging_face",
    "config_to_hugging_face",
    "mapper_from_hugging_face",
    "parallelize_qwen3_moe",
]
