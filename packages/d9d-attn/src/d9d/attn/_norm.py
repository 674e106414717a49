"""Root mean square normalization."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dim (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Computed in fp32 or wider and rounded once, to the dtype of x.

    Args:
        dim: Size of the last dim.
        eps: Added to the mean square.
        zero_centered: Multiply by ``1 + weight`` and start from zeros, so that weight decay pulls towards identity.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, zero_centered: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the weight to identity."""
        self.weight.fill_(0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, of any shape (..., dim); the result has its dtype."""
        weight: Tensor = self.weight
        if self.zero_centered:
            weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        # One dtype for both reaches torch's fused kernel, which computes in fp32 inside for half precision.
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return F.rms_norm(x.to(dtype), (self.dim,), weight.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"{self.dim}, eps={self.eps}, zero_centered={self.zero_centered}"
