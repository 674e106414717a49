"""The schedules that come with d9d: pure functions, and a config class for each."""

from ._dual_pipe_v import DualPipeV, dualpipev
from ._gpipe import GPipe, LoopedBFS, gpipe, looped_bfs
from ._inference import Inference, inference
from ._one_f_one_b import Interleaved1F1B, OneFOneB, interleaved_one_f_one_b, one_f_one_b
from ._zero_bubble import InterleavedZeroBubble, ZeroBubbleH1, interleaved_zero_bubble, zb_h1
from ._zero_bubble_v import ZeroBubbleV, zbv

__all__ = [
    # pure functions
    "dualpipev",
    "gpipe",
    "inference",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "zb_h1",
    "zbv",
    # their configs
    "DualPipeV",
    "GPipe",
    "Inference",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "OneFOneB",
    "ZeroBubbleH1",
    "ZeroBubbleV",
]
