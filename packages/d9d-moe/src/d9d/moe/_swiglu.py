"""The dense feed-forward layer."""

from torch import Tensor, nn

from ._gated import silu_mul, silu_mul_pair


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))`` without biases (Shazeer, 2020, arXiv:2002.05202).

    The projections are ``gate_proj`` and ``up_proj``, or with ``fused=True`` one ``gate_up_proj``, gate above up; and
    ``down_proj``.

    Args:
        hidden_size: Size of the input and output.
        intermediate_size: Size between.
        fused: Whether gate and up are one projection.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        else:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (..., hidden_size)."""
        y: Tensor = self.down_proj(self._hidden(x))
        return y

    def _hidden(self, x: Tensor) -> Tensor:
        if self.fused:
            return silu_mul(self.gate_up_proj(x))
        return silu_mul_pair(self.gate_proj(x), self.up_proj(x))
