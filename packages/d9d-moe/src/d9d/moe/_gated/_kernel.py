"""Triton kernels of the gated activation: a program takes some rows, all of them or, where none is summed, a part.

Shapes: N rows, I intermediate size; tiles are (ROWS, BLOCK).
"""

import triton
import triton.language as tl


@triton.jit
def silu_mul_forward(  # noqa: PLR0917 - a kernel
    gate_ptr,  # (N, I)
    up_ptr,  # (N, I)
    probs_ptr,  # (N); not read unless HAS_PROBS
    out_ptr,  # (N, I), contiguous
    gate_stride,
    up_stride,
    rows,
    SIZE: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < SIZE)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    if HAS_PROBS:
        out *= tl.load(probs_ptr + row, mask=row < rows).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward(  # noqa: PLR0917 - a kernel
    grad_ptr,  # (N, I)
    gate_ptr,  # (N, I)
    up_ptr,  # (N, I)
    probs_ptr,  # (N); not read unless HAS_PROBS
    grad_gate_ptr,  # (N, I)
    grad_up_ptr,  # (N, I)
    grad_probs_ptr,  # (N); not written unless HAS_PROBS
    grad_stride,
    gate_stride,
    up_stride,
    grad_gate_stride,
    grad_up_stride,
    rows,
    SIZE: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # blocks of a row that one program goes through: all of them with HAS_PROBS
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if HAS_PROBS:
        prob = tl.load(probs_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    pull = tl.zeros((ROWS, BLOCK), tl.float32)
    for part in tl.static_range(PARTS):
        column = (tl.program_id(1) * PARTS + part) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < SIZE)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if HAS_PROBS:
            pull += grad * silu * up
            grad *= prob
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        at_gate = grad_gate_ptr + row * grad_gate_stride + column
        at_up = grad_up_ptr + row * grad_up_stride + column
        tl.store(at_gate, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
        tl.store(at_up, (grad * silu).to(grad_up_ptr.dtype.element_ty), mask=inside)
    if HAS_PROBS:
        total = tl.sum(pull, 1)[:, None]
        tl.store(grad_probs_ptr + row, total.to(grad_probs_ptr.dtype.element_ty), mask=row < rows)
