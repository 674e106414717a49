"""Whether our Triton kernels can take a tensor."""

import importlib.util

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_kernels_for(x: Tensor) -> bool:
    """Kernels compute in fp32, on CUDA, where Triton is installed."""
    return x.is_cuda and x.dtype in {torch.bfloat16, torch.float16, torch.float32} and _HAS_TRITON
