"""What a block's config reaches, each against the plain block or a formula."""

import attrs
import pytest
import torch

from d9d.attn import (
    AttentionMask,
    Documents,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RotaryConfig,
    RotaryEmbedding,
)

torch.set_num_threads(1)
PLAIN = GroupedQueryAttentionConfig(hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8)
LENGTH = 7
X = torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COS, SIN = RotaryEmbedding(RotaryConfig(head_dim=8))(torch.arange(LENGTH).expand(2, -1))
TABLES = {"cos": COS, "sin": SIN}


def make(**settings):
    torch.manual_seed(0)
    block = GroupedQueryAttention(attrs.evolve(PLAIN, **settings)).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    return block


@pytest.mark.parametrize("settings", [{}, {"qkv_bias": True, "output_gate": True, "value_head_dim": 4}])
def test_one_matrix_holds_the_rows_of_three(settings):
    apart, fused = make(**settings), make(**settings, fused_qkv=True)
    state = apart.state_dict()
    for kind in ("weight", "bias") if settings else ("weight",):
        state[f"qkv_proj.{kind}"] = torch.cat([state.pop(f"{name}_proj.{kind}") for name in "qkv"])
    fused.load_state_dict(state)
    torch.testing.assert_close(fused(X, **TABLES, mask=AttentionMask()), apart(X, **TABLES, mask=AttentionMask()))


def test_the_gate_is_the_second_part_of_each_head_of_the_query_projection():
    gated, plain = make(output_gate=True, value_head_dim=6), make(value_head_dim=6)
    state = gated.state_dict()
    per_head = state["q_proj.weight"].view(4, 8 + 6, 16)
    plain.load_state_dict({**state, "q_proj.weight": per_head[:, :8].reshape(4 * 8, 16)})
    inner = []
    plain.o_proj.register_forward_pre_hook(lambda _, args: inner.append(args[0]))
    plain(X, **TABLES, mask=AttentionMask())
    gate = torch.einsum("bsx,hex->bshe", X, per_head[:, 8:]).sigmoid()
    expected = (inner[0].view(2, LENGTH, 4, 6) * gate).flatten(2) @ state["o_proj.weight"].t()
    torch.testing.assert_close(gated(X, **TABLES, mask=AttentionMask()), expected)


def test_interleaved_rotation_is_the_other_one_with_dims_in_another_order():
    half, interleaved = make(qk_norm=True), make(qk_norm=True, interleaved_rotary=True)
    order = torch.arange(8).view(2, 4).t().flatten()  # dims i and i + 4 become 2 i and 2 i + 1
    state = half.state_dict()
    for name in "qk":
        rows = state[f"{name}_proj.weight"].view(-1, 8, 16)
        state[f"{name}_proj.weight"] = rows[:, order].reshape(-1, 16)
        state[f"{name}_norm.weight"] = state[f"{name}_norm.weight"][order]
    interleaved.load_state_dict(state)
    torch.testing.assert_close(interleaved(X, **TABLES, mask=AttentionMask()), half(X, **TABLES, mask=AttentionMask()))


@pytest.mark.parametrize("of_mask", [None, 2, 6])
def test_the_narrower_window_counts_and_layers_share_what_is_made_of_it(of_mask):
    block, plain = make(window=4), make()
    mask = AttentionMask(window=of_mask, documents=Documents.from_lengths([[3, 4], [7]]))
    narrower = AttentionMask(window=min(of_mask or 4, 4), documents=mask.documents)
    torch.testing.assert_close(block(X, **TABLES, mask=mask), plain(X, **TABLES, mask=narrower))
    assert mask.within(4) is mask.within(4)
    assert mask.within(None) is mask


@pytest.mark.parametrize("mask", [None, torch.zeros(LENGTH, LENGTH)], ids=["None", "tensor"])
def test_what_is_no_mask_says_what_to_give(mask):
    with pytest.raises(TypeError, match=rf"found {type(mask).__name__}; give AttentionMask\(\)"):
        make()(X, **TABLES, mask=mask)


def test_dropout_is_for_training_only():
    block, plain = make(dropout=0.5), make()
    expected = plain(X, **TABLES, mask=AttentionMask())
    assert not torch.allclose(block(X, **TABLES, mask=AttentionMask()), expected)
    torch.testing.assert_close(block.eval()(X, **TABLES, mask=AttentionMask()), expected)


def test_sinks_take_their_share_and_start_at_zero():
    block = GroupedQueryAttention(attrs.evolve(PLAIN, sinks=True))
    assert (block.sinks == 0).all()
    block, plain = make(sinks=True), make()
    expected = plain(X, **TABLES, mask=AttentionMask())
    block.load_state_dict({**plain.state_dict(), "sinks": torch.full((4,), -1e9)})
    torch.testing.assert_close(block(X, **TABLES, mask=AttentionMask()), expected)
    block.load_state_dict({**plain.state_dict(), "sinks": torch.full((4,), 50.0)})
    assert block(X, **TABLES, mask=AttentionMask()).abs().max() < 1e-9


def test_zero_centred_norms_start_as_identity():
    block = GroupedQueryAttention(attrs.evolve(PLAIN, qk_norm=True, zero_centered_norm=True))
    assert (block.q_norm.weight == 0).all()
    assert block.k_norm.zero_centered


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window must be positive, found 0"),
        ({"soft_cap": -1.0}, "soft_cap must be positive, found -1.0"),
        ({"value_head_dim": 0}, "value_head_dim must be positive, found 0"),
        ({"hidden_size": 0}, "hidden_size must be positive, found 0"),
        ({"head_dim": 0}, "head_dim must be positive, found 0"),
        ({"num_heads": 0}, "num_heads must be positive, found 0"),
        ({"scale": float("nan")}, "scale must be positive, found nan"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), found 1.0"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=f"GroupedQueryAttentionConfig.{message}"):
        attrs.evolve(PLAIN, **settings)


def test_a_zero_centred_norm_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="which qk_norm=False leaves out"):
        attrs.evolve(PLAIN, zero_centered_norm=True)


def test_what_no_backend_can_do_is_refused_when_the_block_is_built():
    with pytest.raises(ValueError, match="'torch', asked for in the configuration, has no sinks, soft cap"):
        make(sinks=True, soft_cap=1.0, backend="torch")
