"""Stand-ins for packages that are not installed: their signatures and conventions, computed by eager math.

Like the kernels they leave NaN where they write nothing, in gradients too, and refuse the shapes these refuse.
"""

# ruff: noqa: FBT002 - the signatures are those of the packages
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from attention_oracle import CONFIGS


def sequences(cu_q, cu_k, max_q, max_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    for i in range(len(cu_q) - 1):
        (q0, q1), (k0, k1) = cu_q[i : i + 2].tolist(), cu_k[i : i + 2].tolist()
        assert q1 - q0 <= max_q
        assert k1 - k0 <= max_k
        yield slice(q0, q1), slice(k0, k1)


def scores_of(q, k, scale, causal, left, right, softcap):
    """(H, S, T), −inf where hidden; positions are aligned at the end."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("shd,thd->hst", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left is not None and left >= 0:
        hidden |= distance > left
    if right is not None and right >= 0:
        hidden |= distance < -right
    return scores.masked_fill(hidden, -torch.inf)


def check_heads(q, k, v):
    assert q.shape[-1] == k.shape[-1]
    assert all(x.shape[-1] % 8 == 0 and x.stride(-1) == 1 for x in (q, k, v))


def wide(*tensors):
    """Like the kernels, accumulate in fp32."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def kept(shape, p, seed):
    generator = torch.Generator().manual_seed(int(seed))
    return (torch.rand(shape, generator=generator) >= p) / (1 - p)


def flash_2_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
):
    check_heads(q, k, v)
    assert q.shape[-1] == v.shape[-1]
    assert len(cu_seqlens_q) > 1, "batch size must be positive"
    out = torch.full_like(q, torch.nan)
    q, k, v = wide(q, k, v)
    lse = q.new_full((q.shape[1], q.shape[0]), torch.nan)
    rng_state = torch.randint(2**31, (1,))
    for of_q, of_k in sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        scores = scores_of(q[of_q], k[of_k], softmax_scale, causal, window_size_left, window_size_right, softcap)
        lse[:, of_q] = scores.logsumexp(-1).nan_to_num(neginf=torch.inf)
        weights = (scores - lse[:, of_q, None]).exp() * kept(scores.shape, dropout_p, rng_state).to(q.dtype)
        out[of_q] = torch.einsum("hst,thd->shd", weights, v[of_k].repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    return out, lse, out.new_empty(0), rng_state


def flash_2_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    for gradient in (dq, dk, dv):
        gradient.fill_(torch.nan)
    dout, q, k, v, out = wide(dout, q, k, v, out)
    write_gradients(
        (dq, dk, dv),
        dout,
        (q, k, v),
        softmax_lse,
        delta=(dout * out).sum(-1).t(),
        sequences=sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        rules=(softmax_scale, causal, window_size_left, window_size_right, softcap),
        dropout=(dropout_p, rng_state),
    )
    return q.new_empty(0)


def write_gradients(gradients, dout, operands, lse, *, delta, sequences, rules, dropout=None):
    """By the kernels' formula, from the log-sum-exp they are given."""
    (dq, dk, dv), (q, k, v) = gradients, operands
    scale, softcap = rules[0], rules[-1]
    group = q.shape[1] // k.shape[1]
    for of_q, of_k in sequences:
        keys, values = (x[of_k].repeat_interleave(group, dim=1) for x in (k, v))
        scores = scores_of(q[of_q], k[of_k], *rules)
        keep = 1.0 if dropout is None else kept(scores.shape, *dropout).to(q.dtype)
        weights = (scores - lse[:, of_q, None]).exp()
        d_weights = torch.einsum("shd,thd->hst", dout[of_q], values) * keep
        d_scores = weights * (d_weights - delta[:, of_q, None]) * scale
        if softcap:
            d_scores = d_scores * (1 - (scores.nan_to_num(neginf=0.0) / softcap).square())
        dq[of_q] = torch.einsum("hst,thd->shd", d_scores, keys).to(dq.dtype)
        dk[of_k] = torch.einsum("hst,shd->thd", d_scores, q[of_q]).unflatten(1, (-1, group)).sum(2).to(dk.dtype)
        d_value = torch.einsum("hst,shd->thd", weights * keep, dout[of_q])
        dv[of_k] = d_value.unflatten(1, (-1, group)).sum(2).to(dv.dtype)


class GarbageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cu):
        ctx.start, ctx.end = int(cu[0]), int(cu[-1])
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[: ctx.start] = gradient[ctx.end :] = torch.nan
        return gradient, None


def flash_4_varlen(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    check_heads(q, k, v)
    assert q.shape[1] == k.shape[1] or q.shape[2] == v.shape[2], "GQA backward requires head_dim == head_dim_v"
    (total_q, heads), dtype = q.shape[:2], q.dtype
    q, k, v = wide(q, k, v)
    start, end = int(cu_seqlens_q[0]), int(cu_seqlens_q[-1])
    q, k, v = (GarbageGradient.apply(x, cu) for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)))
    outs, lses = [v.new_full((start, heads, v.shape[-1]), torch.nan)], [v.new_full((heads, start), torch.nan)]
    for of_q, of_k in sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        scores = scores_of(q[of_q], k[of_k], softmax_scale, causal, *window_size, softcap)
        blind = (scores == -torch.inf).all(-1)
        if learnable_sink is not None:
            sink = learnable_sink.to(scores.dtype)[:, None, None]
            scores = torch.cat([scores, sink.expand(*scores.shape[:2], 1)], -1)
        finite = scores.masked_fill(blind[..., None], 0.0)
        length = of_k.stop - of_k.start
        weights = finite.softmax(-1)[..., :length].masked_fill(blind[..., None], 0.0)
        group = heads // k.shape[1]
        outs.append(torch.einsum("hst,thd->shd", weights, v[of_k].repeat_interleave(group, dim=1)))
        of_blind = -torch.inf if learnable_sink is None else learnable_sink.to(scores.dtype)[:, None].expand_as(blind)
        lses.append(torch.where(blind, of_blind, finite.logsumexp(-1)))
    outs.append(v.new_full((total_q - end, heads, v.shape[-1]), torch.nan))
    lses.append(v.new_full((heads, total_q - end), torch.nan))
    return torch.cat(outs).to(dtype), torch.cat(lses, 1) if return_lse else None


def flash_4_forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    window_size = options.pop("window_size_left"), options.pop("window_size_right")
    flat, lengths = as_sequences((q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    out, lse = flash_4_varlen(*flat, window_size=window_size, **dict(zip(names, lengths)), **options)
    if cu_seqlens_q is None:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out.contiguous(), lse.contiguous(), None, None, None


def as_sequences(tensors, lengths):
    if lengths[0] is not None:
        return tensors, lengths
    queries, keys = tensors[0].shape[1], tensors[1].shape[1]
    row = torch.arange(len(tensors[0]) + 1, dtype=torch.int32)
    return [x.flatten(0, 1) for x in tensors], (row * queries, row * keys, queries, keys)


def flash_4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale,
    causal,
    softcap,
    *,
    window_size_left,
    window_size_right,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    deterministic,
    dlse,
    learnable_sink,
):
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]  # with the strides of x
    by_row = cu_seqlens_q is None
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    *operands, out, dout = wide(q, k, v, out, dout)
    (*operands, out, dout), lengths = as_sequences((*operands, out, dout), lengths)
    gradients = [torch.full_like(x, torch.nan) for x in operands]
    lse, dlse = (x.transpose(0, 1).flatten(1) if by_row and x is not None else x for x in (lse, dlse))
    delta = (dout * out).sum(-1).t()
    if dlse is not None:
        delta = delta - dlse
    write_gradients(
        gradients,
        dout,
        operands,
        lse.nan_to_num(nan=torch.nan, neginf=torch.inf),
        delta=delta,
        sequences=sequences(*lengths),
        rules=(softmax_scale, causal, window_size_left, window_size_right, softcap),
    )
    for x, gradient in zip(found, gradients):
        x.copy_(gradient.view(x.shape))
    if learnable_sink is None:
        return tuple(found)
    written = slice(int(lengths[0][0]), int(lengths[0][-1]))
    share = (learnable_sink.to(lse.dtype)[:, None] - lse[:, written]).exp()
    return *found, -(share * delta[:, written]).sum(1).to(learnable_sink.dtype)


def torch_varlen(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.shape[-1] == value.shape[-1]
    out, _ = flash_4_varlen(
        query,
        key,
        value,
        cu_seqlens_q=cu_seq_q,
        cu_seqlens_k=cu_seq_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        window_size=window_size,
    )
    return out


@pytest.fixture(scope="module")
def varlen_on_cpu():
    """torch's varlen_attn, whose operators are for CUDA."""
    import torch.nn.attention.varlen as varlen  # noqa: PLC0415 - takes its time, and one test needs it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", torch_varlen)
        yield


@pytest.fixture
def flash_packages(tmp_path_factory, write_versions):
    """flash-attn and flash-attn-4, as far as we call them."""
    operators = types.ModuleType("flash_attn.flash_attn_interface")
    operators._flash_attn_varlen_forward, operators._flash_attn_varlen_backward = flash_2_forward, flash_2_backward
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = flash_4_forward, flash_4_backward
    cute = types.ModuleType("flash_attn.cute")
    cute.interface = interface
    package = types.ModuleType("flash_attn")
    modules = {module.__name__: module for module in (package, operators, cute, interface)}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        folder = write_versions(tmp_path_factory.mktemp("site"), flash_attn="2.8.3", flash_attn_4="4.0.0b36")
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="session")
def write_versions():
    """What an installer leaves of distributions in a folder."""

    def write(folder, **versions):
        for name, version in versions.items():
            metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        return folder

    return write


@pytest.fixture(scope="module")
def flex_on_cpu():
    """Flex attention spelled out by torch, on CPU with gradients, which its front door refuses there."""
    import torch.nn.attention.flex_attention as flex  # noqa: PLC0415 - takes seconds, and few tests need it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_validate_device", lambda *_: None)
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


@pytest.fixture(params=CONFIGS)
def config(request):
    """Each backend in turn, run on CPU by stand-ins where its kernels are not here."""
    request.getfixturevalue("flash_packages")
    request.getfixturevalue("flex_on_cpu")
    return CONFIGS[request.param]
