"""Norm, rotary and grouped-query attention, against transformers and by their own rules."""

import attrs
import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3 as hf
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from d9d.attn import (
    AttentionMask,
    Documents,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RMSNorm,
    RotaryConfig,
    RotaryEmbedding,
    apply_rotary,
)

torch.set_num_threads(1)
CONFIG = GroupedQueryAttentionConfig(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True)
HF_CONFIG = Qwen3Config(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e6,
    num_hidden_layers=1,
    attn_implementation="eager",
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}
ROTARY = RotaryEmbedding(RotaryConfig(head_dim=16, base=1e6))


def close(found, expected, dtype):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def make_pair(dtype):
    torch.manual_seed(0)
    ours, theirs = GroupedQueryAttention(CONFIG), hf.Qwen3Attention(HF_CONFIG, 0)
    for norm in (ours.q_norm, ours.k_norm):
        torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    theirs.load_state_dict(ours.state_dict())  # the names are theirs
    return ours.to(dtype), theirs.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_transformers_in_values_and_gradients(dtype):
    ours, theirs = make_pair(dtype)
    x = torch.randn(2, 9, 32, dtype=dtype)
    upstream = torch.randn(2, 9, 32, dtype=dtype)
    positions = torch.stack([torch.arange(9) + 5, torch.arange(9) % 4])
    cos, sin = ROTARY(positions)
    causal = torch.full((9, 9), -torch.inf, dtype=dtype).triu(1)[None, None]
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = ours(x_ours, cos=cos, sin=sin, mask=AttentionMask())
    expected, _ = theirs(x_theirs, (cos.to(dtype), sin.to(dtype)), causal)
    close(out, expected, dtype)
    out.backward(upstream)
    expected.backward(upstream)
    close(x_ours.grad, x_theirs.grad, dtype)
    for parameter, other in zip(ours.parameters(), theirs.parameters()):
        scale = other.grad.abs().max()
        close(parameter.grad / scale, other.grad / scale, dtype)


@pytest.mark.parametrize("positions", [torch.arange(50), torch.arange(10) + 100_000, torch.tensor([0, 1, 2, 0, 1, 7])])
def test_rotary_tables_are_those_of_transformers_for_any_positions(positions):
    theirs = hf.Qwen3RotaryEmbedding(HF_CONFIG)
    found = ROTARY(positions[None])
    expected = theirs(torch.zeros(1), positions[None])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    q, k = torch.randn(1, len(positions), 4, 16), torch.randn(1, len(positions), 2, 16)
    expected = hf.apply_rotary_pos_emb(q, k, *expected, unsqueeze_dim=2)
    assert all(torch.equal(a, b) for a, b in zip(apply_rotary(q, k, *found), expected))


def test_rotary_stays_fp32_whatever_the_dtype_of_the_model():
    positions = torch.arange(3000, 3010)[None]
    before = ROTARY(positions)
    after = RotaryEmbedding(RotaryConfig(head_dim=16, base=1e6)).to(torch.bfloat16)(positions)
    for a, b in zip(before, after):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)
    q = torch.randn(1, 10, 2, 16, dtype=torch.bfloat16)
    exact, _ = apply_rotary(q.double(), q.double(), *before)
    rotated, _ = apply_rotary(q, q, *before)
    assert exact.dtype == torch.float64
    assert torch.equal(rotated, exact.bfloat16())  # one rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_rounds_once_and_has_exact_gradients(dtype, zero_centered):
    norm = RMSNorm(24, zero_centered=zero_centered).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 24, 5).to(dtype).transpose(1, 2).requires_grad_()  # not contiguous
    upstream = torch.randn(3, 5, 24).to(dtype)
    out = norm(x)
    found = out, *torch.autograd.grad(out, (x, norm.weight), upstream)

    x64, weight64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    out64 = x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight64 + zero_centered)
    expected = out64, *torch.autograd.grad(out64, (x64, weight64), upstream.double())
    for a, b in zip(found, expected):
        assert a.dtype == dtype
        close(a.double(), b, dtype)
    if dtype == torch.bfloat16:
        assert torch.equal(found[0], expected[0].bfloat16())


def test_norm_with_wider_weight_keeps_the_dtype_of_its_input():
    assert RMSNorm(8)(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_norm_equals_transformers():
    theirs = hf.Qwen3RMSNorm(24)
    ours = RMSNorm(24)
    x = torch.randn(4, 24)
    close(ours(x), theirs(x), torch.float32)


@pytest.mark.parametrize("backend", ["eager", "torch"])
def test_packed_documents_with_restarting_positions_equal_separate_sequences(backend):
    block = GroupedQueryAttention(attrs.evolve(CONFIG, backend=backend)).double()
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    cos, sin = ROTARY(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))
    packed = block(x, cos=cos, sin=sin, mask=AttentionMask(documents=Documents.from_lengths([[3, 5]])))
    for part in (slice(0, 3), slice(3, 8)):
        alone = block(x[:, part], cos=cos[:, part], sin=sin[:, part], mask=AttentionMask())
        close(packed[:, part], alone, torch.float64)


def test_state_names_and_reset():
    block = GroupedQueryAttention(CONFIG)
    assert sorted(block.state_dict()) == [
        f"{name}.weight" for name in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")
    ]
    biased = GroupedQueryAttention(attrs.evolve(CONFIG, qk_norm=False, qkv_bias=True, output_bias=True))
    assert {n for n in biased.state_dict() if n.endswith("bias")} == {f"{n}_proj.bias" for n in "kovq"}
    with torch.device("meta"):
        meta = GroupedQueryAttention(CONFIG)
    assert all(p.is_meta for p in meta.parameters())


@pytest.mark.parametrize("sinks", [False, True])
def test_a_block_runs_on_meta(sinks):
    block = GroupedQueryAttention(attrs.evolve(CONFIG, sinks=sinks)).to("meta")
    cos, sin = ROTARY(torch.arange(5, device="meta")[None])
    y = block(torch.randn(2, 5, 32, device="meta"), cos=cos, sin=sin, mask=AttentionMask(window=2))
    assert y.is_meta
    assert y.shape == (2, 5, 32)


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="multiple of num_kv_heads, found 4 and 3"):
        attrs.evolve(CONFIG, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim must be even and positive, found 5"):
        RotaryConfig(head_dim=5)
