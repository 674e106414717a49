"""Triton kernels of norm and rotation.

Shapes: T tokens (batch × positions), H heads of q or k, D head dim, R rotary dim, P pairs (R / 2, up to a power of 2),
E dims beyond R (up to a power of 2), L leaves. A tile is HEADS heads of one token; its dims come in three parts, the first
and second of each pair, and the rest.
"""

import triton
import triton.language as tl


@triton.jit
def _load_pairs(x_ptr, heads, n_heads, head_stride, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and second of each pair, in fp32, (HEADS, P)."""
    inside = (heads < n_heads)[:, None]
    rows = x_ptr + heads[:, None] * head_stride
    if INTERLEAVED:
        dims = tl.arange(0, 2 * P)[None, :]
        both = tl.load(rows + dims, mask=inside & (dims < R), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (heads.shape[0], P, 2)))
    else:
        pairs = tl.arange(0, P)[None, :]
        mask = inside & (pairs < R // 2)
        first = tl.load(rows + pairs, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(rows + R // 2 + pairs, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    x_ptr, first, second, heads, n_heads, head_stride, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr
):
    inside = (heads < n_heads)[:, None]
    rows = x_ptr + heads[:, None] * head_stride
    dtype = x_ptr.dtype.element_ty
    if INTERLEAVED:
        dims = tl.arange(0, 2 * P)[None, :]
        both = tl.reshape(tl.join(first, second), (heads.shape[0], 2 * P))
        tl.store(rows + dims, both.to(dtype), mask=inside & (dims < R))
    else:
        pairs = tl.arange(0, P)[None, :]
        mask = inside & (pairs < R // 2)
        tl.store(rows + pairs, first.to(dtype), mask=mask)
        tl.store(rows + R // 2 + pairs, second.to(dtype), mask=mask)


@triton.jit
def _load_weight(
    weight_ptr,
    NORM: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """The three parts of a weight, in fp32, (1, P), (1, P) and (1, E); zeros without a norm."""
    pairs = tl.arange(0, P)[None, :]
    rest = R + tl.arange(0, E)[None, :]
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else R // 2
    first = tl.load(weight_ptr + pairs * step, mask=(pairs < R // 2) & NORM, other=0.0).to(tl.float32)
    second = tl.load(weight_ptr + pairs * step + apart, mask=(pairs < R // 2) & NORM, other=0.0).to(tl.float32)
    third = tl.load(weight_ptr + rest, mask=(rest < D) & NORM, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        first += 1.0
        second += 1.0
        third += 1.0
    return first, second, third


@triton.jit
def _turn_heads(
    x_ptr,  # (H, D) of one token
    y_ptr,  # (H, D) of one token, contiguous
    scale_1,  # (1, P)
    scale_2,  # (1, P)
    scale_3,  # (1, E)
    cos,  # (1, P)
    sin,  # (1, P)
    n_heads,
    head_stride,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
):
    """The first n_heads of H heads of one token."""
    for start in range(0, H, HEADS):
        heads = start + tl.arange(0, HEADS)
        rest = R + tl.arange(0, E)[None, :]
        mask = (heads < n_heads)[:, None] & (rest < D)
        first, second = _load_pairs(x_ptr, heads, n_heads, head_stride, R, P, INTERLEAVED)
        if R < D:
            third = tl.load(x_ptr + heads[:, None] * head_stride + rest, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            if R < D:
                square += tl.sum(third * third, 1)
            rstd = (1.0 / tl.sqrt(square / D + eps))[:, None]
            first = first * rstd * scale_1
            second = second * rstd * scale_2
            if R < D:
                third = third * rstd * scale_3
        _store_pairs(
            y_ptr, first * cos - second * sin, second * cos + first * sin, heads, n_heads, D, R, P, INTERLEAVED
        )
        if R < D:
            tl.store(y_ptr + heads[:, None] * D + rest, third.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "n_positions", "eps"])
def turn_tokens(  # noqa: PLR0917 - a kernel
    q_ptr,  # (B, S, HQ, D), strided, as k (B, S, HK, D)
    k_ptr,
    cos_ptr,  # (B, S, R), strided, as sin; the first R / 2 are read
    sin_ptr,
    q_weight_ptr,  # (D); not read unless Q_NORM
    k_weight_ptr,  # (D); not read unless K_NORM
    q_out_ptr,  # (T, HQ, D), contiguous
    k_out_ptr,  # (T, HK, D), contiguous
    q_batch,
    q_position,
    q_head,
    k_batch,
    k_position,
    k_head,
    table_batch,
    table_position,
    n_tokens,
    n_positions,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARDS: tl.constexpr,  # turn by minus the angle
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program TOKENS tokens, all heads of q and k."""
    pairs = tl.arange(0, P)[None, :]
    q_scale_1, q_scale_2, q_scale_3 = _load_weight(q_weight_ptr, Q_NORM, R, D, P, E, INTERLEAVED, ZERO_CENTERED)
    k_scale_1, k_scale_2, k_scale_3 = _load_weight(k_weight_ptr, K_NORM, R, D, P, E, INTERLEAVED, ZERO_CENTERED)
    for step in tl.range(0, TOKENS, num_stages=STAGES):
        token = tl.program_id(0) * TOKENS + step
        live = (token < n_tokens).to(tl.int32)  # beyond the last token there is no head
        batch = (token // n_positions).to(tl.int64)
        position = (token % n_positions).to(tl.int64)
        offset = batch * table_batch + position * table_position + pairs
        cos = tl.load(cos_ptr + offset, mask=pairs < live * (R // 2), other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + offset, mask=pairs < live * (R // 2), other=0.0).to(tl.float32)
        if BACKWARDS:
            sin = -sin
        out = token.to(tl.int64) * D
        _turn_heads(
            q_ptr + batch * q_batch + position * q_position,
            q_out_ptr + out * HQ,
            q_scale_1,
            q_scale_2,
            q_scale_3,
            cos,
            sin,
            live * HQ,
            q_head,
            eps,
            HQ,
            D,
            R,
            Q_NORM,
            INTERLEAVED,
            Q_HEADS,
            P,
            E,
        )
        _turn_heads(
            k_ptr + batch * k_batch + position * k_position,
            k_out_ptr + out * HK,
            k_scale_1,
            k_scale_2,
            k_scale_3,
            cos,
            sin,
            live * HK,
            k_head,
            eps,
            HK,
            D,
            R,
            K_NORM,
            INTERLEAVED,
            K_HEADS,
            P,
            E,
        )


@triton.jit
def _differentiate_heads(
    dy_ptr,  # (H, D) of one token
    x_ptr,  # (H, D) of one token
    dx_ptr,  # (H, D) of one token, contiguous; not written unless INPUTS
    sum_1,  # (HEADS, P)
    sum_2,  # (HEADS, P)
    sum_3,  # (HEADS, E)
    scale_1,
    scale_2,
    scale_3,
    cos,
    sin,
    n_heads,
    dy_head,
    x_head,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INPUTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
):
    """Returns the sums with those of this token added."""
    for start in range(0, H, HEADS):
        heads = start + tl.arange(0, HEADS)
        rest = R + tl.arange(0, E)[None, :]
        mask = (heads < n_heads)[:, None] & (rest < D)
        upper, lower = _load_pairs(dy_ptr, heads, n_heads, dy_head, R, P, INTERLEAVED)
        first = upper * cos + lower * sin
        second = lower * cos - upper * sin
        if R < D:
            third = tl.load(dy_ptr + heads[:, None] * dy_head + rest, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            normed_1, normed_2 = _load_pairs(x_ptr, heads, n_heads, x_head, R, P, INTERLEAVED)
            square = tl.sum(normed_1 * normed_1, 1) + tl.sum(normed_2 * normed_2, 1)
            if R < D:
                normed_3 = tl.load(x_ptr + heads[:, None] * x_head + rest, mask=mask, other=0.0).to(tl.float32)
                square += tl.sum(normed_3 * normed_3, 1)
            rstd = tl.where(heads < n_heads, 1.0 / tl.sqrt(square / D + eps), 0.0)[:, None]
            normed_1 *= rstd
            normed_2 *= rstd
            if R < D:
                normed_3 *= rstd
            if WEIGHTS:
                sum_1 += first * normed_1
                sum_2 += second * normed_2
                if R < D:
                    sum_3 += third * normed_3
            if INPUTS:
                first *= scale_1
                second *= scale_2
                pull = tl.sum(first * normed_1, 1) + tl.sum(second * normed_2, 1)
                if R < D:
                    third *= scale_3
                    pull += tl.sum(third * normed_3, 1)
                pull = (pull / D)[:, None]
                first = rstd * (first - normed_1 * pull)
                second = rstd * (second - normed_2 * pull)
                if R < D:
                    third = rstd * (third - normed_3 * pull)
        if INPUTS:
            _store_pairs(dx_ptr, first, second, heads, n_heads, D, R, P, INTERLEAVED)
            if R < D:
                tl.store(dx_ptr + heads[:, None] * D + rest, third.to(dx_ptr.dtype.element_ty), mask=mask)
    return sum_1, sum_2, sum_3


@triton.jit
def _store_sums(
    leaf_ptr,
    sum_1,
    sum_2,
    sum_3,
    D: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    pairs = tl.arange(0, P)
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else R // 2
    tl.store(leaf_ptr + pairs * step, tl.sum(sum_1, 0), mask=pairs < R // 2)
    tl.store(leaf_ptr + pairs * step + apart, tl.sum(sum_2, 0), mask=pairs < R // 2)
    if R < D:
        rest = R + tl.arange(0, E)
        tl.store(leaf_ptr + rest, tl.sum(sum_3, 0), mask=rest < D)


@triton.jit(do_not_specialize=["n_tokens", "n_positions", "n_leaves", "eps"])
def differentiate_leaves(  # noqa: PLR0917 - a kernel
    dq_out_ptr,  # (B, S, HQ, D), strided, as all of q and k
    dk_out_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    dq_ptr,  # (T, HQ, D), contiguous; not written unless INPUTS
    dk_ptr,  # (T, HK, D), contiguous; not written unless INPUTS
    leaves_ptr,  # (L, 2, D), fp32; not written unless WEIGHTS
    dq_out_batch,
    dq_out_position,
    dq_out_head,
    dk_out_batch,
    dk_out_position,
    dk_out_head,
    q_batch,
    q_position,
    q_head,
    k_batch,
    k_position,
    k_head,
    table_batch,
    table_position,
    n_tokens,
    n_positions,
    n_leaves,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INPUTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAVES: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program LEAVES leaves of TOKENS tokens; each leaf is summed in the order of its tokens."""
    pairs = tl.arange(0, P)[None, :]
    q_scale_1, q_scale_2, q_scale_3 = _load_weight(q_weight_ptr, Q_NORM, R, D, P, E, INTERLEAVED, ZERO_CENTERED)
    k_scale_1, k_scale_2, k_scale_3 = _load_weight(k_weight_ptr, K_NORM, R, D, P, E, INTERLEAVED, ZERO_CENTERED)
    for index in range(LEAVES):
        leaf = tl.program_id(0) * LEAVES + index
        q_1 = tl.zeros((Q_HEADS, P), tl.float32)
        q_2 = tl.zeros((Q_HEADS, P), tl.float32)
        q_3 = tl.zeros((Q_HEADS, E), tl.float32)
        k_1 = tl.zeros((K_HEADS, P), tl.float32)
        k_2 = tl.zeros((K_HEADS, P), tl.float32)
        k_3 = tl.zeros((K_HEADS, E), tl.float32)
        for step in tl.range(0, TOKENS, num_stages=STAGES):
            token = leaf * TOKENS + step
            live = (token < n_tokens).to(tl.int32)  # beyond the last token there is no head
            batch = (token // n_positions).to(tl.int64)
            position = (token % n_positions).to(tl.int64)
            offset = batch * table_batch + position * table_position + pairs
            cos = tl.load(cos_ptr + offset, mask=pairs < live * (R // 2), other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + offset, mask=pairs < live * (R // 2), other=0.0).to(tl.float32)
            out = token.to(tl.int64) * D
            q_1, q_2, q_3 = _differentiate_heads(
                dq_out_ptr + batch * dq_out_batch + position * dq_out_position,
                q_ptr + batch * q_batch + position * q_position,
                dq_ptr + out * HQ,
                q_1,
                q_2,
                q_3,
                q_scale_1,
                q_scale_2,
                q_scale_3,
                cos,
                sin,
                live * HQ,
                dq_out_head,
                q_head,
                eps,
                HQ,
                D,
                R,
                Q_NORM,
                INTERLEAVED,
                INPUTS,
                WEIGHTS,
                Q_HEADS,
                P,
                E,
            )
            k_1, k_2, k_3 = _differentiate_heads(
                dk_out_ptr + batch * dk_out_batch + position * dk_out_position,
                k_ptr + batch * k_batch + position * k_position,
                dk_ptr + out * HK,
                k_1,
                k_2,
                k_3,
                k_scale_1,
                k_scale_2,
                k_scale_3,
                cos,
                sin,
                live * HK,
                dk_out_head,
                k_head,
                eps,
                HK,
                D,
                R,
                K_NORM,
                INTERLEAVED,
                INPUTS,
                WEIGHTS,
                K_HEADS,
                P,
                E,
            )
        if WEIGHTS and leaf < n_leaves:
            leaf_ptr = leaves_ptr + leaf.to(tl.int64) * 2 * D
            _store_sums(leaf_ptr, q_1, q_2, q_3, D, R, P, E, INTERLEAVED)
            _store_sums(leaf_ptr + D, k_1, k_2, k_3, D, R, P, E, INTERLEAVED)
