"""The bytes of tensors, for files and collectives: numpy, which torch would take them from, may not be there."""

from __future__ import annotations

import ctypes

from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor from its first to its last element, which must outlive the view."""
    if not tensor.numel():
        return memoryview(b"")
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    return memoryview((ctypes.c_ubyte * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())).cast("B")
