"""Whether our Triton kernels can run."""

import importlib.util

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether Triton is installed."""
    return _HAS_TRITON


def has_kernels_for(x: Tensor) -> bool:
    """Whether x is on CUDA and of a dtype that is computed in fp32, and Triton is there."""
    return x.is_cuda and x.dtype in {torch.bfloat16, torch.float16, torch.float32} and _HAS_TRITON
