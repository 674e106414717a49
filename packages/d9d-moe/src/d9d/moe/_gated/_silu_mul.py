"""The gated activation: in plain torch anywhere, as one kernel each way on CUDA.

Shapes: N rows, I intermediate size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._operator import operator
from .._triton import has_kernels_for


def silu_mul(gate_up: Tensor, probs: Tensor | None = None) -> Tensor:
    """``silu(gate) · up · probs`` (Shazeer, 2020, arXiv:2002.05202), computed in fp32 or wider and rounded once.

    Args:
        gate_up: (..., 2·I), gate before up.
        probs: (...), a factor of each row, fp32 or wider; None is 1.

    Returns:
        (..., I) in the dtype of gate_up.

    Raises:
        ValueError: The last dim of gate_up is odd, or probs has not its other dims.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up must be of one size, found both in the odd shape {tuple(gate_up.shape)!r}")
    _check_probs(gate_up, probs)
    if not has_kernels_for(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return _formula(gate, up, probs)
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    out: Tensor = _SiluMul.apply(rows, None, None if probs is None else probs.reshape(-1))
    return out.view(*gate_up.shape[:-1], out.shape[-1])


def silu_mul_pair(gate: Tensor, up: Tensor, probs: Tensor | None = None) -> Tensor:
    """See `silu_mul`; gate and up, both (..., I), are apart.

    Raises:
        ValueError: They differ in shape, or probs has not their other dims.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, found {tuple(gate.shape)!r} and {tuple(up.shape)!r}")
    _check_probs(gate, probs)
    if not has_kernels_for(gate):
        return _formula(gate, up, probs)
    size = gate.shape[-1]
    out: Tensor = _SiluMul.apply(
        gate.reshape(-1, size), up.reshape(-1, size), None if probs is None else probs.reshape(-1)
    )
    return out.view(gate.shape)


def _check_probs(rows: Tensor, probs: Tensor | None) -> None:
    """A kernel would read beyond the end."""
    if probs is not None and probs.shape != rows.shape[:-1]:
        raise ValueError(f"rows {tuple(rows.shape)!r} need as many probabilities, found {tuple(probs.shape)!r}")


def _formula(gate: Tensor, up: Tensor, probs: Tensor | None) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    out = F.silu(gate.to(wide)) * up.to(wide)
    return (out if probs is None else out * probs[..., None]).to(gate.dtype)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=1)
    return first, second


@operator("d9d::silu_mul")
def _op(gate_NI: Tensor, up_NI: Tensor | None, probs_N: Tensor | None) -> Tensor:
    """Without ``up`` the gate is (N, 2·I) and holds both."""
    from ._launch import forward  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return forward(*_halves(gate_NI, up_NI), probs_N)


@_op.register_fake
def _(gate_NI: Tensor, up_NI: Tensor | None, probs_N: Tensor | None) -> Tensor:  # noqa: ARG001
    gate_NI, _ = _halves(gate_NI, up_NI)
    return torch.empty_like(gate_NI, memory_format=torch.contiguous_format)


@operator("d9d::silu_mul_backward")
def _backward_op(
    grad_NI: Tensor, gate_NI: Tensor, up_NI: Tensor | None, probs_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and probabilities; empty for what there is not."""
    from ._launch import backward  # noqa: PLC0415 - Triton comes with torch for CUDA only

    gate, up, probs = _empty_gradients(gate_NI, up_NI, probs_N)
    found = backward(grad_NI, *_halves(gate_NI, up_NI), probs_N, into=_halves(gate, None if up_NI is None else up))
    return gate, up, probs if found is None else found


@_backward_op.register_fake
def _empty_gradients_fake(
    grad_NI: Tensor,  # noqa: ARG001
    gate_NI: Tensor,
    up_NI: Tensor | None,
    probs_N: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(gate_NI, up_NI, probs_N)


def _empty_gradients(gate_NI: Tensor, up_NI: Tensor | None, probs_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor | None) -> Tensor:
        return gate_NI.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(gate_NI), like(up_NI), like(probs_N)


class _SiluMul(torch.autograd.Function):
    # A node of our own, since the gradient that an operator registers costs more time on the host.
    @staticmethod
    def forward(ctx: Any, gate_NI: Tensor, up_NI: Tensor | None, probs_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_NI, up_NI, probs_N)
        out_NI: Tensor = _op(gate_NI, up_NI, probs_N)
        return out_NI

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        gradients = _backward_op(*upstream, *operands)
        return tuple(None if x is None else gradient for x, gradient in zip(operands, gradients))
