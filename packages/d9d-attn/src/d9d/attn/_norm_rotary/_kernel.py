"""Triton kernels of norm and rotation.

Shapes: T tokens (batch × positions), H heads of q or k, D head dim, R rotary dim, P pairs (R / 2) and E dims beyond R,
both up to a power of 2, L leaves. A tile has AT_ONCE tokens × HEADS heads; its dims come in three parts: the first and
the second of each pair, and the rest. Long because a kernel names its arguments one by one, for q and again for k.
"""

import triton
import triton.language as tl


@triton.jit
def _load_pairs(rows, inside, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second of each pair, in fp32, (rows, P), of rows at pointers (rows, 1)."""
    if INTERLEAVED:
        dims = tl.arange(0, 2 * P)[None, :]
        both = tl.load(rows + dims, mask=inside & (dims < R), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (rows.shape[0], P, 2)))
    else:
        pairs = tl.arange(0, P)[None, :]
        mask = inside & (pairs < R // 2)
        first = tl.load(rows + pairs, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(rows + R // 2 + pairs, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(  # noqa: PLR0917 - as all kernels
    rows,
    first,
    second,
    inside,
    R: tl.constexpr,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    dtype = rows.dtype.element_ty
    if INTERLEAVED:
        dims = tl.arange(0, 2 * P)[None, :]
        both = tl.reshape(tl.join(first, second), (rows.shape[0], 2 * P))
        tl.store(rows + dims, both.to(dtype), mask=inside & (dims < R))
    else:
        pairs = tl.arange(0, P)[None, :]
        mask = inside & (pairs < R // 2)
        tl.store(rows + pairs, first.to(dtype), mask=mask)
        tl.store(rows + R // 2 + pairs, second.to(dtype), mask=mask)


@triton.jit
def _load_weight(  # noqa: PLR0917
    weight_ptr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """The three parts of a weight, in fp32, (1, P), (1, P) and (1, E); not read without a norm."""
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
def _load_angles(  # noqa: PLR0917
    cos_ptr, sin_ptr, tokens, n_tokens, n_positions, batch_stride, position_stride, R: tl.constexpr, P: tl.constexpr
):
    """Cosines and sines of (rows, 1) tokens, (rows, P)."""
    pairs = tl.arange(0, P)[None, :]
    batch = (tokens // n_positions).to(tl.int64)
    offset = batch * batch_stride + (tokens % n_positions).to(tl.int64) * position_stride + pairs
    mask = (tokens < n_tokens) & (pairs < R // 2)
    cos = tl.load(cos_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _rows(  # noqa: PLR0917
    x_ptr, tokens, heads, n_positions, batch_stride, position_stride, head_stride
):
    """Pointers to heads of tokens, (rows, 1)."""
    batch, position = (tokens // n_positions).to(tl.int64), (tokens % n_positions).to(tl.int64)
    return x_ptr + batch * batch_stride + position * position_stride + heads.to(tl.int64) * head_stride


@triton.jit
def _turn(  # noqa: PLR0917
    x_ptr,  # (B, S, H, D), strided
    y_ptr,  # (T, H, D), contiguous
    weight_ptr,  # (D); not read unless NORM
    cos_ptr,
    sin_ptr,
    start,  # first token
    batch_stride,
    position_stride,
    head_stride,
    table_batch,
    table_position,
    n_tokens,
    n_positions,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARDS: tl.constexpr,
    STEPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
):
    scale_1, scale_2, scale_3 = _load_weight(weight_ptr, NORM, D, R, P, E, INTERLEAVED, ZERO_CENTERED)
    row = tl.arange(0, AT_ONCE * HEADS)[:, None]
    one_or_all = tl.arange(0, 1 if AT_ONCE == 1 else AT_ONCE * HEADS)[:, None]
    rest = R + tl.arange(0, E)[None, :]
    for step in range(STEPS):
        token = start + step * AT_ONCE
        cos, sin = _load_angles(
            cos_ptr,
            sin_ptr,
            token + one_or_all // HEADS,
            n_tokens,
            n_positions,
            table_batch,
            table_position,
            R,
            P,
        )
        if BACKWARDS:
            sin = -sin
        tokens = token + row // HEADS
        for first_head in range(0, H, HEADS):
            heads = first_head + row % HEADS
            inside = (heads < H) & (tokens < n_tokens)
            x_rows = _rows(x_ptr, tokens, heads, n_positions, batch_stride, position_stride, head_stride)
            y_rows = y_ptr + (tokens.to(tl.int64) * H + heads) * D
            first, second = _load_pairs(x_rows, inside, R, P, INTERLEAVED)
            if R < D:
                third = tl.load(x_rows + rest, mask=inside & (rest < D), other=0.0).to(tl.float32)
            if NORM:
                square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
                if R < D:
                    square += tl.sum(third * third, 1)
                rstd = (1.0 / tl.sqrt(square / D + eps))[:, None]
                first = first * rstd * scale_1
                second = second * rstd * scale_2
                if R < D:
                    third = third * rstd * scale_3
            _store_pairs(y_rows, first * cos - second * sin, second * cos + first * sin, inside, R, P, INTERLEAVED)
            if R < D:
                tl.store(y_rows + rest, third.to(y_ptr.dtype.element_ty), mask=inside & (rest < D))


@triton.jit(do_not_specialize=["q_programs", "n_tokens", "n_positions", "eps"])
def turn_tokens(  # noqa: PLR0917
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
    q_programs,
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
    STEPS: tl.constexpr,
    Q_AT_ONCE: tl.constexpr,
    K_AT_ONCE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
):
    """A program STEPS tiles of tokens, of q or, after q_programs, of k."""
    program = tl.program_id(0)
    if program < q_programs:
        _turn(
            q_ptr,
            q_out_ptr,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            program * (STEPS * Q_AT_ONCE),
            q_batch,
            q_position,
            q_head,
            table_batch,
            table_position,
            n_tokens,
            n_positions,
            eps,
            HQ,
            D,
            R,
            Q_NORM,
            ZERO_CENTERED,
            INTERLEAVED,
            BACKWARDS,
            STEPS,
            Q_AT_ONCE,
            Q_HEADS,
            P,
            E,
        )
    else:
        _turn(
            k_ptr,
            k_out_ptr,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            (program - q_programs) * (STEPS * K_AT_ONCE),
            k_batch,
            k_position,
            k_head,
            table_batch,
            table_position,
            n_tokens,
            n_positions,
            eps,
            HK,
            D,
            R,
            K_NORM,
            ZERO_CENTERED,
            INTERLEAVED,
            BACKWARDS,
            STEPS,
            K_AT_ONCE,
            K_HEADS,
            P,
            E,
        )


@triton.jit
def _differentiate(  # noqa: C901, PLR0912, PLR0915, PLR0917 - one pass over memory, of constants
    dy_ptr,  # (B, S, H, D), strided
    x_ptr,  # (B, S, H, D), strided; not read unless NORM
    weight_ptr,  # (D); not read unless NORM
    cos_ptr,
    sin_ptr,
    dx_ptr,  # (T, H, D), contiguous; not written unless INPUTS
    leaf_ptr,  # (D), fp32; not written unless WEIGHTS
    start,  # first token
    dy_batch,
    dy_position,
    dy_head,
    x_batch,
    x_position,
    x_head,
    table_batch,
    table_position,
    n_tokens,
    n_positions,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INPUTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    STEPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One leaf of q or of k."""
    scale_1, scale_2, scale_3 = _load_weight(weight_ptr, NORM, D, R, P, E, INTERLEAVED, ZERO_CENTERED)
    row = tl.arange(0, AT_ONCE * HEADS)[:, None]
    one_or_all = tl.arange(0, 1 if AT_ONCE == 1 else AT_ONCE * HEADS)[:, None]
    rest = R + tl.arange(0, E)[None, :]
    sum_1 = tl.zeros((AT_ONCE * HEADS, P), tl.float32)
    sum_2 = tl.zeros((AT_ONCE * HEADS, P), tl.float32)
    sum_3 = tl.zeros((AT_ONCE * HEADS, E), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        token = start + step * AT_ONCE
        cos, sin = _load_angles(
            cos_ptr,
            sin_ptr,
            token + one_or_all // HEADS,
            n_tokens,
            n_positions,
            table_batch,
            table_position,
            R,
            P,
        )
        tokens = token + row // HEADS
        for first_head in range(0, H, HEADS):
            heads = first_head + row % HEADS
            inside = (heads < H) & (tokens < n_tokens)
            dy_rows = _rows(dy_ptr, tokens, heads, n_positions, dy_batch, dy_position, dy_head)
            upper, lower = _load_pairs(dy_rows, inside, R, P, INTERLEAVED)
            first = upper * cos + lower * sin
            second = lower * cos - upper * sin
            if R < D:
                third = tl.load(dy_rows + rest, mask=inside & (rest < D), other=0.0).to(tl.float32)
            if NORM:
                x_rows = _rows(x_ptr, tokens, heads, n_positions, x_batch, x_position, x_head)
                normed_1, normed_2 = _load_pairs(x_rows, inside, R, P, INTERLEAVED)
                square = tl.sum(normed_1 * normed_1, 1) + tl.sum(normed_2 * normed_2, 1)
                if R < D:
                    normed_3 = tl.load(x_rows + rest, mask=inside & (rest < D), other=0.0).to(tl.float32)
                    square += tl.sum(normed_3 * normed_3, 1)
                # Without eps, rows that are not there would be 0 · ∞.
                rstd = tl.where(inside, (1.0 / tl.sqrt(square / D + eps))[:, None], 0.0)
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
                dx_rows = dx_ptr + (tokens.to(tl.int64) * H + heads) * D
                _store_pairs(dx_rows, first, second, inside, R, P, INTERLEAVED)
                if R < D:
                    tl.store(dx_rows + rest, third.to(dx_ptr.dtype.element_ty), mask=inside & (rest < D))
    if WEIGHTS and start < n_tokens:
        pairs = tl.arange(0, P)
        stride: tl.constexpr = 2 if INTERLEAVED else 1
        apart: tl.constexpr = 1 if INTERLEAVED else R // 2
        tl.store(leaf_ptr + pairs * stride, tl.sum(sum_1, 0), mask=pairs < R // 2)
        tl.store(leaf_ptr + pairs * stride + apart, tl.sum(sum_2, 0), mask=pairs < R // 2)
        if R < D:
            others = R + tl.arange(0, E)
            tl.store(leaf_ptr + others, tl.sum(sum_3, 0), mask=others < D)


@triton.jit(do_not_specialize=["q_programs", "n_tokens", "n_positions", "eps"])
def differentiate_leaves(  # noqa: PLR0917
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
    q_programs,
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
    INPUTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAVES: tl.constexpr,
    Q_AT_ONCE: tl.constexpr,
    K_AT_ONCE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program LEAVES leaves of TOKENS tokens, of q or, after q_programs, of k.

    Each leaf is summed in the order of its tokens.
    """
    program = tl.program_id(0)
    if program < q_programs:
        for index in range(LEAVES):
            leaf = program * LEAVES + index
            _differentiate(
                dq_out_ptr,
                q_ptr,
                q_weight_ptr,
                cos_ptr,
                sin_ptr,
                dq_ptr,
                leaves_ptr + leaf.to(tl.int64) * 2 * D,
                leaf * TOKENS,
                dq_out_batch,
                dq_out_position,
                dq_out_head,
                q_batch,
                q_position,
                q_head,
                table_batch,
                table_position,
                n_tokens,
                n_positions,
                eps,
                HQ,
                D,
                R,
                Q_NORM,
                ZERO_CENTERED,
                INTERLEAVED,
                INPUTS,
                WEIGHTS,
                TOKENS // Q_AT_ONCE,
                Q_AT_ONCE,
                Q_HEADS,
                P,
                E,
                STAGES,
            )
    else:
        for index in range(LEAVES):
            leaf = (program - q_programs) * LEAVES + index
            _differentiate(
                dk_out_ptr,
                k_ptr,
                k_weight_ptr,
                cos_ptr,
                sin_ptr,
                dk_ptr,
                leaves_ptr + (leaf.to(tl.int64) * 2 + 1) * D,
                leaf * TOKENS,
                dk_out_batch,
                dk_out_position,
                dk_out_head,
                k_batch,
                k_position,
                k_head,
                table_batch,
                table_position,
                n_tokens,
                n_positions,
                eps,
                HK,
                D,
                R,
                K_NORM,
                ZERO_CENTERED,
                INTERLEAVED,
                INPUTS,
                WEIGHTS,
                TOKENS // K_AT_ONCE,
                K_AT_ONCE,
                K_HEADS,
                P,
                E,
                STAGES,
            )
