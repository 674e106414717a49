"""What autocast is to round, and what not."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cast_by_autocast(x: Tensor) -> Tensor:
    """Give an operand of a product the dtype that torch.nn.Linear would give it: autocast's, except to fp64."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Within this context matrix products on the device of x stay in the dtype of their operands."""
    is_on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if is_on else nullcontext()
