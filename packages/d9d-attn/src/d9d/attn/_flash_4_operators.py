"""The kernels of flash-attn-4 as operators of torch, into which torch.compile does not look.

They are called where torch calls them too, one level below the package's functions, which no compiler can follow.

Shapes: q (B, S, H, D), k (B, T, G, D), v (B, T, G, E), or with ``cu_queries`` and ``cu_keys`` (N, H, D) and so on, the
sequences one after the other; sinks (H). Results: (B, S, H, E) or (N, H, E), and the log-sum-exp in fp32, (B, H, S) or
(H, N).
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ._operator import operator
from ._second_derivative import refuse_second_derivative


def kernels() -> Any:
    """Where they are; imports the package.

    Raises:
        ImportError: It is not installed.
    """
    return importlib.import_module("flash_attn.cute.interface")


@operator("d9d::flash_attention_4")
def flash_attention_4_operator(  # noqa: PLR0917 - operators take no keywords from autograd
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    cu_queries: Tensor | None,
    cu_keys: Tensor | None,
    max_queries: int | None,
    max_keys: int | None,
    scale: float,
    soft_cap: float,
    causal: bool,  # noqa: FBT001
    before: int | None,
    after: int | None,
    deterministic: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """Attend; the result and the log-sum-exp."""
    del deterministic
    with torch.cuda.device_of(q):
        out, lse, *_ = kernels()._flash_attn_fwd(  # noqa: SLF001 - see above
            q,
            k,
            v,
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            softmax_scale=scale,
            causal=causal,
            softcap=soft_cap,
            window_size_left=before,
            window_size_right=after,
            learnable_sink=sinks_H,
            return_lse=True,
        )
    return out.contiguous(), lse.contiguous()


@flash_attention_4_operator.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    *positions, heads, _dim = q.shape
    lse_shape = [*positions[:-1], heads, positions[-1]]
    return q.new_empty([*positions, heads, v.shape[-1]]), q.new_empty(lse_shape, dtype=torch.float32)


@operator("d9d::flash_attention_4_backward")
def flash_attention_4_backward_operator(  # noqa: PLR0917
    d_out: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks_H: Tensor | None,
    cu_queries: Tensor | None,
    cu_keys: Tensor | None,
    max_queries: int | None,
    max_keys: int | None,
    scale: float,
    soft_cap: float,
    causal: bool,  # noqa: FBT001
    before: int | None,
    after: int | None,
    deterministic: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and sinks; that of no sinks is empty."""
    with torch.cuda.device_of(q):
        dq, dk, dv, *d_sinks = kernels()._flash_attn_bwd(  # noqa: SLF001
            q,
            k,
            v,
            out,
            torch.zeros_like(out) if d_out is None else d_out,
            lse,
            scale,
            causal,
            soft_cap,
            window_size_left=before,
            window_size_right=after,
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            deterministic=deterministic,
            dlse=d_lse,
            learnable_sink=sinks_H,
        )
    # Theirs have the strides of q, k and v, and those of the results of an operator must be known when it is traced.
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_sinks[0] if d_sinks else q.new_empty(0)


@flash_attention_4_backward_operator.register_fake
def _(
    _d_out: Tensor | None,
    _d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _out: Tensor,
    _lse: Tensor,
    sinks_H: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks_H, cu_queries, cu_keys, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks_H, cu_queries, cu_keys)


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    *gradients, d_sinks = flash_attention_4_backward_operator(d_out, d_lse, *ctx.saved_tensors, *ctx.settings)
    rest = [None] * (2 + len(ctx.settings))
    return *gradients, d_sinks if ctx.needs_input_grad[3] else None, *rest


flash_attention_4_operator.register_autograd(_backward, setup_context=_keep)
