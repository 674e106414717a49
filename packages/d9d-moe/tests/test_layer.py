"""The layer on one process, against a plain loop over experts and transformers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from d9d.moe import GroupedSwiGLU, MoELayer, SoftmaxScoring, SwiGLU, TopKRouter

torch.set_num_threads(1)
HIDDEN, INTERMEDIATE = 6, 5


def make_layer(num_experts, top_k, *, renormalize=True, seed=0):
    torch.manual_seed(seed)
    router = TopKRouter(HIDDEN, num_experts, top_k, scoring=SoftmaxScoring(renormalize=renormalize))
    return MoELayer(router, GroupedSwiGLU(num_experts, HIDDEN, INTERMEDIATE)).double()


def oracle(x, router_weight, gate_up, down, top_k, renormalize):
    """Token by token, expert by expert."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        scores = (router_weight @ token).softmax(0)
        chosen = scores.argsort(descending=True)[:top_k]
        total = scores[chosen].sum() if renormalize else 1.0
        y = torch.zeros_like(token)
        for e in chosen.tolist():
            gate, up = (gate_up[e] @ token).chunk(2)
            y = y + scores[e] / total * (down[e] @ (F.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows).view(x.shape)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    num_experts=st.integers(1, 6),
    batch=st.integers(1, 3),
    length=st.integers(1, 4),
    renormalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_layer_equals_a_loop_over_experts(data, num_experts, batch, length, renormalize, seed):
    top_k = data.draw(st.integers(1, num_experts))
    layer = make_layer(num_experts, top_k, renormalize=renormalize, seed=seed)
    x = torch.randn(batch, length, HIDDEN, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    weights = [x, layer.router.weight, layer.experts.gate_up_proj, layer.experts.down_proj]
    out = layer(x)
    found = torch.autograd.grad(out, weights, upstream)
    expected_out = oracle(*weights, top_k, renormalize)
    # An expert that no token chose has no part in the oracle's graph; its gradient is zero.
    expected = torch.autograd.grad(expected_out, weights, upstream, materialize_grads=True)
    torch.testing.assert_close((out, *found), (expected_out, *expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [0, 1])
def test_untouched_parameters_get_zero_gradients(tokens):
    layer = make_layer(4, 2)
    out = layer(torch.randn(1, tokens, HIDDEN, dtype=torch.float64))
    assert out.shape == (1, tokens, HIDDEN)
    out.sum().backward()
    touched = layer.expert_load > 0
    assert touched.sum() == 2 * tokens
    for parameter in layer.expert_parameters():
        assert (parameter.grad[~touched] == 0).all()
        assert (parameter.grad[touched] != 0).any() or not tokens
    assert layer.router.weight.grad is not None


def test_all_tokens_to_one_expert_and_all_experts_for_each_token():
    layer = make_layer(4, 1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2, 0] = 100.0
    x = torch.rand(1, 7, HIDDEN, dtype=torch.float64) + 0.1
    layer(x)
    assert layer.expert_load.tolist() == [0, 0, 7, 0]
    everyone = make_layer(3, 3)
    everyone(x)
    assert everyone.expert_load.tolist() == [7, 7, 7]


def test_output_of_each_token_stays_in_its_place_in_the_batch():
    layer = make_layer(4, 2)
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    out = layer(x)
    for b in range(2):
        for t in range(3):
            torch.testing.assert_close(out[b, t], layer(x[b : b + 1, t : t + 1])[0, 0], rtol=1e-12, atol=1e-12)


def test_a_token_needs_no_batch():
    layer = make_layer(4, 2)
    x = torch.randn(HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer(x[None])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_full_recompute_counts_once_and_chooses_the_same_experts(use_reentrant):
    plain, recomputed = make_layer(5, 2), make_layer(5, 2)
    x = torch.randn(2, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    chosen = []
    recomputed.router.register_forward_hook(lambda _module, _args, routing: chosen.append(routing.ids_TK))
    for _ in range(2):
        plain(x).sum().backward()
        checkpoint(recomputed, x, use_reentrant=use_reentrant).sum().backward()
    assert plain.expert_load.sum() == 2 * 2 * 8
    assert torch.equal(plain.expert_load, recomputed.expert_load)
    assert len(chosen) == 4
    assert all(torch.equal(chosen[0], ids) for ids in chosen)
    for a, b in zip(plain.parameters(), recomputed.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_load_is_counted_in_training_only_and_is_no_state():
    layer = make_layer(4, 2)
    layer.eval()
    layer(torch.randn(1, 3, HIDDEN, dtype=torch.float64))
    assert layer.expert_load.sum() == 0
    assert sorted(layer.state_dict()) == ["experts.down_proj", "experts.gate_up_proj", "router.weight"]
    layer.to(torch.bfloat16)
    assert layer.expert_load.dtype == torch.int64


def test_router_scores_in_fp32_and_keeps_fp64():
    router = TopKRouter(HIDDEN, 4, 2)
    x = torch.randn(3, HIDDEN)
    assert router.double()(x.double()).probs_TK.dtype == torch.float64
    routing = router.bfloat16()(x.bfloat16())
    assert routing.probs_TK.dtype == torch.float32
    torch.testing.assert_close(routing.probs_TK.sum(-1), torch.ones(3))
    assert routing.ids_TK.dtype == torch.int64


def test_a_bf16_layer_is_right_to_its_dtype():
    layer = make_layer(4, 2).bfloat16()
    x = torch.randn(2, 5, HIDDEN, dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    weights = [w.detach().double() for w in (layer.router.weight, *layer.expert_parameters())]
    expected = oracle(x.double(), *weights, 2, renormalize=True)
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_layer_equals_transformers_in_values_and_gradients(dtype, tolerance):
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    theirs, ours = Qwen3MoeSparseMoeBlock(config).to(dtype), make_layer(8, 3).to(dtype)
    pairs = {
        theirs.gate.weight: ours.router.weight,
        theirs.experts.gate_up_proj: ours.experts.gate_up_proj,
        theirs.experts.down_proj: ours.experts.down_proj,
    }
    with torch.no_grad():
        for their, our in pairs.items():
            their.copy_(our)
    x = torch.randn(2, 9, HIDDEN, dtype=dtype)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = ours(x_ours), theirs(x_theirs)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    # transformers computes scores in fp32 even for fp64, hence the tolerance there.
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for their, our in [*pairs.items(), (x_theirs, x_ours)]:
        torch.testing.assert_close(our.grad, their.grad, rtol=tolerance, atol=tolerance)


def test_dense_swiglu_follows_its_formula():
    layer = SwiGLU(6, 5)
    x = torch.randn(2, 3, 6)
    gate, up = x @ layer.gate_proj.weight.t(), x @ layer.up_proj.weight.t()
    torch.testing.assert_close(layer(x), (gate * gate.sigmoid() * up) @ layer.down_proj.weight.t())
    assert all(isinstance(m, nn.Linear) and m.bias is None for m in layer.children())


def test_weights_are_reset_in_place_on_any_device():
    with torch.device("meta"):
        layer = MoELayer(TopKRouter(HIDDEN, 4, 2), GroupedSwiGLU(4, HIDDEN, INTERMEDIATE))
    layer.to_empty(device="cpu")
    for module in (layer.router, layer.experts):
        torch.manual_seed(3)
        module.reset_parameters()
        first = [p.clone() for p in module.parameters()]
        torch.manual_seed(3)
        module.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(first, module.parameters()))
    assert layer.expert_load.sum() == 0


@pytest.mark.parametrize("top_k", [0, 5])
def test_bad_top_k_is_refused(top_k):
    with pytest.raises(ValueError, match=f"within 1 and num_experts = 4, found {top_k}"):
        TopKRouter(HIDDEN, 4, top_k)


def test_router_and_experts_must_agree():
    with pytest.raises(ValueError, match="the router knows 4 experts and there are 3"):
        MoELayer(TopKRouter(HIDDEN, 4, 2), GroupedSwiGLU(3, HIDDEN, INTERMEDIATE))
