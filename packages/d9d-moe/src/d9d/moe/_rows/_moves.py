"""Tokens to rows and back, with gradients.

Shapes: T tokens, K slots of a token, N rows, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from .._operator import operator
from .._triton import has_kernels_for, has_kernels_on
from ._index import RowIndex


def gather_rows(x_TH: Tensor, index: RowIndex) -> Tensor:
    """Copy each token to its rows: (N, H)."""
    x_NH: Tensor = _GatherRows.apply(x_TH, None, index.row_TK, index.rows)[0]
    return x_NH


def gather_rows_with_probs(x_TH: Tensor, probs_TK: Tensor, index: RowIndex) -> tuple[Tensor, Tensor]:
    """Copy each token to its rows (N, H), and the number of each slot to its row (N,)."""
    x_NH, probs_N = _GatherRows.apply(x_TH, probs_TK, index.row_TK, index.rows)
    return x_NH, probs_N


def pack_rows(
    x_TH: Tensor, probs_TK: Tensor, ids_TK: Tensor, row_TP: Tensor, *, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Copy each token, of any dtype, with its probabilities and ids to its rows in three tensors. Without gradient.

    Args:
        x_TH: Tokens.
        probs_TK: All probabilities of a token.
        ids_TK: All ids of a token.
        row_TP: Of a `RowIndex`.
        into: (N, H), (N, K) and (N, K), int32, whose rows may lie apart.
    """
    if has_kernels_on(x_TH):
        from ._launch import pack  # noqa: PLC0415 - Triton comes with torch for CUDA only

        pack(x_TH, probs_TK, ids_TK, row_TP, into=into)
        return
    for out, x in zip(into, (x_TH, probs_TK, ids_TK)):
        out.copy_(_copied(x.repeat_interleave(row_TP.shape[1], dim=0), row_TP, out.shape[0]))


def sum_rows_into(
    y_NH: Tensor,
    probs_N: Tensor | None,
    row_TK: Tensor,
    *,
    into: tuple[Tensor, Tensor | None],
    weights_TK: Tensor | None = None,
) -> None:
    """Add the rows of each token, and bring the number of each row to its slot, both if given. Without gradient.

    Args:
        y_NH: Rows.
        probs_N: Numbers of the rows.
        row_TK: Of a `RowIndex`.
        into: (T, H) and (T, K), whose rows may lie apart.
        weights_TK: Weights of the sum.
    """
    if has_kernels_for(y_NH):
        from ._launch import add_up  # noqa: PLC0415 - Triton comes with torch for CUDA only

        add_up(y_NH, weights_TK, probs_N, row_TK, into=into)
        return
    out_TH, out_probs_TK = into
    out_TH.copy_(_added(y_NH, weights_TK, row_TK))
    if out_probs_TK is not None and probs_N is not None:
        out_probs_TK.copy_(_of_rows(probs_N, row_TK))


def sum_rows(y_NH: Tensor, index: RowIndex, *, weights_TK: Tensor | None = None) -> Tensor:
    """Add the rows of each token, weighted or not: (T, H), zeros for a token without rows.

    Accumulated in fp32 or wider and rounded once, to the dtype of y.
    """
    tokens_TH: Tensor = _SumRows.apply(y_NH, weights_TK, index.row_TK)
    return tokens_TH


@operator("d9d::gather_rows")
def gather_operator(x_TH: Tensor, probs_TK: Tensor | None, row_TK: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows, and numbers of the rows: empty without any of the slots."""
    if has_kernels_for(x_TH):
        from ._launch import gather  # noqa: PLC0415 - Triton comes with torch for CUDA only

        x_NH = x_TH.new_empty(rows, x_TH.shape[1])
        probs_N = gather(x_TH, probs_TK, row_TK, x_NH)
        return x_NH, x_TH.new_empty(0) if probs_N is None else probs_N
    x_NH = _copied(x_TH.repeat_interleave(row_TK.shape[1], dim=0), row_TK, rows)
    return x_NH, x_TH.new_empty(0) if probs_TK is None else _copied(probs_TK.flatten(), row_TK, rows)


@gather_operator.register_fake
def _(x_TH: Tensor, probs_TK: Tensor | None, row_TK: Tensor, rows: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    x_NH = x_TH.new_empty(rows, x_TH.shape[1])
    return x_NH, x_TH.new_empty(0) if probs_TK is None else probs_TK.new_empty(rows)


@operator("d9d::sum_rows")
def sum_operator(
    y_NH: Tensor, weights_TK: Tensor | None, probs_N: Tensor | None, row_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens, and numbers of the slots: empty without any of the rows."""
    x_TH = y_NH.new_empty(row_TK.shape[0], y_NH.shape[1])
    probs_TK = None if probs_N is None else probs_N.new_empty(row_TK.shape)
    sum_rows_into(y_NH, probs_N, row_TK, into=(x_TH, probs_TK), weights_TK=weights_TK)
    return x_TH, y_NH.new_empty(0) if probs_TK is None else probs_TK


@sum_operator.register_fake
def _(y_NH: Tensor, weights_TK: Tensor | None, probs_N: Tensor | None, row_TK: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    x_TH = y_NH.new_empty(row_TK.shape[0], y_NH.shape[1])
    return x_TH, y_NH.new_empty(0) if probs_N is None else probs_N.new_empty(row_TK.shape)


@operator("d9d::weigh_rows")
def _weigh(grad_TH: Tensor, y_NH: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights of a weighted sum."""
    if has_kernels_for(y_NH):
        from ._launch import weigh  # noqa: PLC0415 - Triton comes with torch for CUDA only

        return weigh(grad_TH, y_NH, weights_TK, row_TK)
    exact = torch.promote_types(y_NH.dtype, torch.float32)
    grad_TKH = grad_TH.to(exact)[:, None] * weights_TK[..., None].to(exact)
    grad_y_NH = _copied(grad_TKH.flatten(0, 1).to(y_NH.dtype), row_TK, len(y_NH))
    y_TKH = _of_rows(y_NH, row_TK).to(exact)
    return grad_y_NH, torch.einsum("th,tkh->tk", grad_TH.to(exact), y_TKH).to(weights_TK.dtype)


@_weigh.register_fake
def _(grad_TH: Tensor, y_NH: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(y_NH), torch.empty_like(weights_TK)


class _GatherRows(torch.autograd.Function):
    # A node of our own, since the gradient that an operator registers costs more time on the host.
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, probs_TK: Tensor | None, row_TK: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(row_TK)
        ctx.has_probs = probs_TK is not None
        x_NH, probs_N = gather_operator(x_TH, probs_TK, row_TK, rows)
        return x_NH, probs_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_NH, grad_probs_N = upstream
        (row_TK,) = ctx.saved_tensors
        grad_TH, grad_probs_TK = sum_operator(grad_NH, None, grad_probs_N if ctx.has_probs else None, row_TK)
        return grad_TH, grad_probs_TK if ctx.has_probs else None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
        ctx.rows = y_NH.shape[0]
        ctx.save_for_backward(row_TK, *(() if weights_TK is None else (y_NH, weights_TK)))
        tokens_TH: Tensor = sum_operator(y_NH, weights_TK, None, row_TK)[0]
        return tokens_TH

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TH,) = upstream
        row_TK, *weighted = ctx.saved_tensors
        if weighted:
            return *_weigh(grad_TH, *weighted, row_TK), None
        return gather_operator(grad_TH, None, row_TK, ctx.rows)[0], None, None


def _copied(x: Tensor, row_TK: Tensor, rows: int) -> Tensor:
    """Slots (T·K, …) to their rows; what has none goes to one row more, which is cut off."""
    out = x.new_empty(rows + 1, *x.shape[1:])
    out[row_TK.flatten().where(row_TK.flatten() >= 0, rows)] = x
    return out[:rows].clone()


def _of_rows(y: Tensor, row_TK: Tensor) -> Tensor:
    """Rows (N, …) to their slots (T, K, …); zeros where there is none."""
    if y.shape[0] == 0:
        return y.new_zeros(*row_TK.shape, *y.shape[1:])
    has_row_TK = (row_TK >= 0).view(*row_TK.shape, *(1 for _ in y.shape[1:]))
    return y[row_TK.clamp(min=0)].where(has_row_TK, 0)


def _added(y_NH: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    total_TH = y_NH.new_zeros(row_TK.shape[0], y_NH.shape[1], dtype=torch.promote_types(y_NH.dtype, torch.float32))
    for slot in range(row_TK.shape[1]):  # in this order, as the kernel
        y_TH = _of_rows(y_NH, row_TK[:, slot : slot + 1])[:, 0].to(total_TH.dtype)
        total_TH += y_TH if weights_TK is None else y_TH * weights_TK[:, slot : slot + 1].to(total_TH.dtype)
    return total_TH.to(y_NH.dtype)
