"""The public functions, and which way they go."""

from torch import Tensor

from ._reference import plain_rms_norm


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, zero_centered: bool = False) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dim; with zero_centered ``1 + weight`` stands for the weight.

    Computed in fp32 or wider and rounded once, to the dtype of x.

    Args:
        x: (..., D).
        weight: (D,), of any dtype.
        eps: Added to the mean square.
        zero_centered: Multiply by ``1 + weight``.
    """
    return plain_rms_norm(x, weight, eps=eps, zero_centered=zero_centered)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Add two tensors of one shape and normalize their sum, as it is once rounded; see `rms_norm`.

    Returns:
        The normed sum, and the sum.
    """
    total = x + residual
    return rms_norm(total, weight, eps=eps, zero_centered=zero_centered), total
