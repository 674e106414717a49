"""Launches of the gated activation's kernels.

Shapes: N rows, I intermediate size.
"""

from typing import Any

import torch
from torch import Tensor

from ._kernel import silu_mul_backward, silu_mul_forward

MAX_BLOCK = 2048


def forward(gate_NI: Tensor, up_NI: Tensor, probs_N: Tensor | None) -> Tensor:
    """``silu(gate) · up · probs``, (N, I), in the dtype of the gate."""
    rows, size = gate_NI.shape
    out_NI = torch.empty((rows, size), dtype=gate_NI.dtype, device=gate_NI.device)
    if out_NI.numel() == 0:
        return out_NI
    gate_NI, up_NI = _with_dense_rows(gate_NI), _with_dense_rows(up_NI)
    block = _block(size)
    kernel: Any = silu_mul_forward[(rows, -(-size // block))]
    kernel(
        gate_NI,
        up_NI,
        gate_NI if probs_N is None else probs_N,
        out_NI,
        gate_NI.stride(0),
        up_NI.stride(0),
        SIZE=size,
        HAS_PROBS=probs_N is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out_NI


def backward(
    grad_NI: Tensor, gate_NI: Tensor, up_NI: Tensor, probs_N: Tensor | None, *, into: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Write the gradients of gate and up ``into`` two tensors, whose rows may lie apart; give that of probabilities."""
    grad_gate_NI, grad_up_NI = into
    rows, size = gate_NI.shape
    grad_probs_N = None if probs_N is None else torch.zeros_like(probs_N)
    if grad_NI.numel() == 0:
        return grad_probs_N
    grad_NI, gate_NI, up_NI = map(_with_dense_rows, (grad_NI, gate_NI, up_NI))
    block = _block(size)
    blocks = -(-size // block)
    parts = 1 if probs_N is None else blocks
    kernel: Any = silu_mul_backward[(rows, blocks // parts)]
    kernel(
        grad_NI,
        gate_NI,
        up_NI,
        gate_NI if probs_N is None else probs_N,
        grad_gate_NI,
        grad_up_NI,
        grad_gate_NI if grad_probs_N is None else grad_probs_N,
        grad_NI.stride(0),
        gate_NI.stride(0),
        up_NI.stride(0),
        grad_gate_NI.stride(0),
        grad_up_NI.stride(0),
        SIZE=size,
        HAS_PROBS=probs_N is not None,
        BLOCK=block,
        PARTS=parts,
        num_warps=_warps(block),
    )
    return grad_probs_N


def _with_dense_rows(x: Tensor) -> Tensor:
    """Give each row unit stride; rows may lie apart, as halves of a matrix do."""
    return x if x.stride(1) == 1 else x.contiguous()


def _block(size: int) -> int:
    return min(MAX_BLOCK, 1 << max(4, (size - 1).bit_length()))


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
