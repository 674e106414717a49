"""Rotary position embedding: settings, scalings to longer contexts, and the cosines and sines of positions."""

from ._embedding import RotaryConfig, RotaryEmbedding
from ._llama3 import Llama3Scaling
from ._scaling import LinearScaling, NTKScaling, RotaryScaling
from ._yarn import YarnScaling

__all__ = [
    "Llama3Scaling",
    "LinearScaling",
    "NTKScaling",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryScaling",
    "YarnScaling",
]
