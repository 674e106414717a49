"""Where Triton kernels run, and the form of tensors that they take."""

import importlib.util

import torch
from torch import Tensor, nn

_IS_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernels(device_type: str) -> bool:
    """Whether kernels run there."""
    return device_type == "cuda" and _IS_TRITON_INSTALLED


def fits(first: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels take such tensors: on one device that has kernels, in dtypes of at most 32 bits.

    Subclasses, DTensor above all, go the plain way, where every operation knows them.
    """
    given = [first, *(x for x in others if x is not None)]
    return has_kernels(first.device.type) and all(
        x.dtype in _DTYPES and x.device == first.device and (type(x) is Tensor or type(x) is nn.Parameter)
        for x in given
    )


def rows_of(x: Tensor) -> Tensor:
    """(..., D) as (N, D) whose last dim is contiguous, without a copy where that can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def only(gradient: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns tensors: an empty one for what was not asked for."""
    return like.new_empty(0) if gradient is None else gradient


def splits(inputs: tuple[Tensor | None, ...], weights: tuple[Tensor | None, ...]) -> bool:
    """Whether a backward pass may ask for the one without the other, eagerly; what is compiled is one node anyhow."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return all(any(x is not None and x.requires_grad for x in side) for side in (inputs, weights))
