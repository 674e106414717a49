"""The dense feed-forward layer."""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))`` without biases (Shazeer, 2020, arXiv:2002.05202).

    Args:
        hidden_size: Size of the input and output.
        intermediate_size: Size between.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (..., hidden_size)."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y
