"""The norm as a module."""

import torch
from torch import Tensor, nn

from ._apply import add_rms_norm, rms_norm


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
        return rms_norm(x, self.weight, eps=self.eps, zero_centered=self.zero_centered)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed sum of two tensors of one shape, and the sum: one pass over memory on CUDA."""
        return add_rms_norm(x, residual, self.weight, eps=self.eps, zero_centered=self.zero_centered)

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"{self.dim}, eps={self.eps}, zero_centered={self.zero_centered}"
