"""The norm in plain torch: the way of every device and dtype without a kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    """See `rms_norm`."""
    if zero_centered:
        weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
    # One dtype for both reaches torch's fused kernel, which computes in fp32 inside for half precision.
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)
