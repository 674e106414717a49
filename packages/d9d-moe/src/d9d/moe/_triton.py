"""Whether our Triton kernels can run, and where."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

OptionsP = ParamSpec("OptionsP")
ResultT = TypeVar("ResultT")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_kernels_on(x: Tensor) -> bool:
    """Whether x is on CUDA, and Triton is there."""
    return x.is_cuda and _HAS_TRITON


def has_kernels_for(x: Tensor) -> bool:
    """The same, and x is of a dtype that is computed in fp32."""
    return has_kernels_on(x) and x.dtype in _DTYPES


def on_its_device(
    launch: Callable[Concatenate[Tensor, OptionsP], ResultT],
) -> Callable[Concatenate[Tensor, OptionsP], ResultT]:
    """Launch on the device of the first tensor: Triton takes the current device, which may be another GPU."""

    @functools.wraps(launch)
    def run(x: Tensor, /, *args: OptionsP.args, **options: OptionsP.kwargs) -> ResultT:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launch(x, *args, **options)
        with torch.cuda.device_of(x):
            return launch(x, *args, **options)

    return run
