"""Backends agree with an oracle written from the definition, in values and gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.attn import AttentionMask, Documents, EagerAttentionConfig, TorchAttentionConfig

torch.set_num_threads(1)
EAGER, TORCH = EagerAttentionConfig().build(), TorchAttentionConfig().build()


def sees(mask, b, h, s, t, queries, keys):
    """Whether query s of head h sees key t, one rule at a time."""
    at = s + keys - queries
    if mask.causal and t > at:
        return False
    if mask.window is not None and abs(at - t) >= mask.window:
        return False
    if mask.documents is not None:
        ends = mask.documents.cu_seqlens.tolist()[1:]
        of_query, of_key = (next((i for i, e in enumerate(ends) if b * keys + x < e), None) for x in (at, t))
        if of_query is None or of_query != of_key:
            return False
    if mask.bias is not None:
        value = mask.bias.expand(mask.bias.shape[0], mask.bias.shape[1], queries, keys)
        value = value[b % value.shape[0], h % value.shape[1], s, t].item()
        return value if isinstance(value, bool) else value > -math.inf
    return True


def oracle(q, k, v, mask, scale, sinks=None):
    """Loop over batch, heads and queries; differentiable."""
    batch, queries, heads, _ = q.shape
    keys, key_heads = k.shape[1:3]
    rows = []
    for b in range(batch):
        for s in range(queries):
            for h in range(heads):
                g = h * key_heads // heads
                seen = [t for t in range(keys) if sees(mask, b, h, s, t, queries, keys)]
                if not seen:
                    rows.append(0 * q[b, s, h].sum() + v.new_zeros(v.shape[-1]))
                    continue
                scores = (k[b, seen, g] @ q[b, s, h]) * scale
                if mask.additive is not None:
                    bias = mask.bias.expand(mask.bias.shape[0], mask.bias.shape[1], queries, keys)
                    scores = scores + bias[b % bias.shape[0], h % bias.shape[1], s, seen]
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h, None]])
                rows.append(scores.softmax(0)[: len(seen)] @ v[b, seen, g])
    return torch.stack(rows).view(batch, queries, heads, -1)


@st.composite
def problems(draw):
    batch, keys = draw(st.integers(1, 2)), draw(st.integers(1, 7))
    key_heads, per_key_head = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    heads = key_heads * per_key_head
    documents = None
    if draw(st.booleans()):
        queries = keys
        total = batch * keys
        cuts = draw(st.sets(st.integers(1, total), min_size=1).map(sorted))
        cuts = sorted({*cuts, *(c for c in range(keys, total, keys) if c < cuts[-1])})
        lengths = [b - a for a, b in zip([0, *cuts], cuts)]
        documents = Documents(torch.tensor([0, *cuts], dtype=torch.int32), max(lengths))
    else:
        queries = draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    bias_shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), queries, keys)
    kept = torch.rand(bias_shape, generator=generator) > 0.4
    bias = draw(st.sampled_from([None, kept, randn(*bias_shape), randn(*bias_shape).masked_fill(~kept, -torch.inf)]))
    mask = AttentionMask(
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, 1, 2, 5])),
        documents=documents,
        bias=bias,
    )
    head_dim, value_dim = draw(st.sampled_from([(4, 4), (2, 6), (8, 3)]))
    q, k = randn(batch, queries, heads, head_dim), randn(batch, keys, key_heads, head_dim)
    return q, k, randn(batch, keys, key_heads, value_dim), mask, randn(heads), randn(batch, queries, heads, value_dim)


def values_and_gradients(attend, inputs, upstream):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, upstream, materialize_grads=True)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_backends_follow_the_definition_in_values_and_gradients(problem):
    *qkv, mask, sinks, upstream = problem
    expected = values_and_gradients(lambda q, k, v: oracle(q, k, v, mask, 0.3), qkv, upstream)
    for backend in (EAGER, TORCH):
        found = values_and_gradients(lambda q, k, v, b=backend: b(q, k, v, mask, scale=0.3), qkv, upstream)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    expected = values_and_gradients(lambda q, k, v, s: oracle(q, k, v, mask, 0.3, s), [*qkv, sinks], upstream)
    found = values_and_gradients(lambda q, k, v, s: EAGER(q, k, v, mask, scale=0.3, sinks_H=s), [*qkv, sinks], upstream)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", [EAGER, TORCH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("additive", [False, True])
def test_rows_without_any_key_are_zero_and_have_no_nan_gradient(backend, dtype, additive):
    torch.manual_seed(0)
    keep = torch.tensor([[False, False, True, True], [False, False, False, False]])  # left-padded; all padding
    bias = keep[:, None, None, :]
    if additive:
        bias = torch.zeros(bias.shape, dtype=dtype).masked_fill(~bias, -torch.inf)
    q = torch.randn(2, 4, 4, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 4, 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    out = backend(q, k, v, AttentionMask(bias=bias), scale=1.0)
    assert out.dtype == dtype
    assert (out[0, :2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, 2:] != 0).any(-1).all()  # one element may be 0 in bf16
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", [EAGER, TORCH])
def test_packed_documents_equal_separate_sequences(backend):
    lengths = [[3, 5], [1, 7]]
    q, k, v = (torch.randn(2, 8, h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    packed = backend(q, k, v, AttentionMask(documents=Documents.from_lengths(lengths)), scale=0.5)
    parts = []
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            part = [x[row : row + 1, start : start + length] for x in (q, k, v)]
            parts.append(backend(*part, AttentionMask(), scale=0.5).squeeze(0))
            start += length
    separate = torch.cat(parts).view(packed.shape)
    upstream = torch.randn_like(packed)
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(packed, (q, k, v), upstream),
        torch.autograd.grad(separate, (q, k, v), upstream),
        rtol=1e-12,
        atol=1e-12,
    )


def test_a_learned_bias_gets_its_gradient():
    q, k, v = (torch.randn(1, 3, 2, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(b(q, k, v, AttentionMask(bias=bias), scale=1.0).square().sum(), bias)
        for b in (EAGER, TORCH)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-11)


def test_a_mask_is_worked_out_once_per_shape():
    mask = AttentionMask(window=2)
    shape = {"batch": 1, "queries": 3, "keys": 3, "device": torch.device("cpu")}
    assert mask.visibility(**shape) is mask.visibility(**shape)
    assert mask.visibility(**shape).keys[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]


@pytest.mark.parametrize("backend", [EAGER, TORCH])
def test_a_mask_of_an_evaluation_serves_training(backend):
    mask = AttentionMask(window=2)
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.inference_mode():
        backend(q, q, q, mask, scale=1.0)
    backend(q, q, q, mask, scale=1.0).sum().backward()
    assert q.grad.isfinite().all()


def test_bad_masks_say_what_is_wrong():
    with pytest.raises(ValueError, match="window must be at least 1 or None, found 0"):
        AttentionMask(window=0)
    with pytest.raises(ValueError, match="bias must be bool or floating, found torch.int64"):
        AttentionMask(bias=torch.ones(1, 1, 2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rows must be equally long, found \[3, 4\]"):
        Documents.from_lengths([[3], [4]])
    with pytest.raises(ValueError, match="must be positive"):
        Documents.from_lengths([[3, 0]])
    mask = AttentionMask(documents=Documents.from_lengths([[3]]))
    with pytest.raises(ValueError, match="as many queries as keys, found 1 and 3"):
        EAGER(torch.zeros(1, 1, 1, 2), torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2), mask, scale=1.0)
    with pytest.raises(ValueError, match="'torch' has no sinks; use 'eager'"):
        TORCH(*[torch.zeros(1, 1, 1, 2)] * 3, AttentionMask(), scale=1.0, sinks_H=torch.zeros(1))
