"""Matrix products that accumulate in fp32 or wider, whatever the dtype of their factors."""

import contextlib

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Where sums of such numbers lose nothing: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """``out = a · b``, rounded once, to the dtype of ``out``."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a · b`` in the dtype of ``total``, in one kernel on CUDA."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


def under_autocast(hidden: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
    """Operands as autocast narrows them for `torch.nn.Linear`; an fp32 weight stays, to be rounded within operators."""
    device_type = hidden.device.type
    is_on = device_type in {"cpu", "cuda"} and torch.is_autocast_enabled(device_type)
    if not is_on or torch.float64 in {hidden.dtype, weight_VH.dtype}:
        return hidden, weight_VH
    dtype = torch.get_autocast_dtype(device_type)
    return hidden.to(dtype), weight_VH if weight_VH.dtype == wide(dtype) else weight_VH.to(dtype)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Leave dtypes as they are within."""
    if device_type in {"cpu", "cuda"} or torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
