"""Launches of the gated activation's kernels.

Shapes: N rows, I intermediate size.
"""

from typing import Any

import torch
from torch import Tensor

from .._triton import on_its_device
from ._kernel import silu_mul_backward, silu_mul_forward

MAX_BLOCK = 4096
ROWS_TIMES_BLOCK = 2048
"""Short rows share a program, until a tile has so many numbers; measured on an H200."""


@on_its_device
def forward(gate_NI: Tensor, up_NI: Tensor, probs_N: Tensor | None) -> Tensor:
    """``silu(gate) · up · probs``, (N, I), in the dtype of the gate."""
    rows, size = gate_NI.shape
    out_NI = torch.empty((rows, size), dtype=gate_NI.dtype, device=gate_NI.device)
    if out_NI.numel() == 0:
        return out_NI
    gate_NI, up_NI = _with_dense_rows(gate_NI), _with_dense_rows(up_NI)
    tile, warps = _tile(size)
    kernel: Any = silu_mul_forward[(-(-rows // tile["ROWS"]), -(-size // tile["BLOCK"]))]
    kernel(
        gate_NI,
        up_NI,
        gate_NI if probs_N is None else probs_N,
        out_NI,
        gate_NI.stride(0),
        up_NI.stride(0),
        rows,
        SIZE=size,
        HAS_PROBS=probs_N is not None,
        **tile,
        num_warps=warps,
    )
    return out_NI


@on_its_device
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
    tile, warps = _tile(size)
    blocks = -(-size // tile["BLOCK"])
    parts = 1 if probs_N is None else blocks
    kernel: Any = silu_mul_backward[(-(-rows // tile["ROWS"]), blocks // parts)]
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
        rows,
        SIZE=size,
        HAS_PROBS=probs_N is not None,
        **tile,
        PARTS=parts,
        num_warps=warps,
    )
    return grad_probs_N


def _with_dense_rows(x: Tensor) -> Tensor:
    """Give each row unit stride; rows may lie apart, as halves of a matrix do."""
    return x if x.stride(1) == 1 else x.contiguous()


def _tile(size: int) -> tuple[dict[str, int], int]:
    """Rows and columns of a program, powers of 2, and its warps."""
    block = min(MAX_BLOCK, 1 << max(4, (size - 1).bit_length()))
    rows = max(1, ROWS_TIMES_BLOCK // block)
    return {"ROWS": rows, "BLOCK": block}, max(1, min(8, rows * block // 512))
