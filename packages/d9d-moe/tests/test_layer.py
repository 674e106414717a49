"""The layer on one process, against a plain loop over experts."""

import copy
import pickle
from typing import ClassVar

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from d9d.moe import (
    Capabilities,
    EagerGroupedMMConfig,
    GroupedMMConfig,
    GroupedSwiGLU,
    MoELayer,
    PlainGatedActivation,
    SoftmaxScoring,
    SwiGLU,
    TopKRouter,
    TorchGroupedMMConfig,
)

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
        assert (parameter.grad[touched] != 0).flatten(1).any(1).all()
    assert (layer.router.weight.grad != 0).any() == (tokens > 0)


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


@pytest.mark.parametrize("fused", [False, True])
def test_dense_swiglu_follows_its_formula(fused):
    layer = SwiGLU(6, 5, fused=fused)
    x = torch.randn(2, 3, 6)
    if fused:
        gate, up = (x @ layer.gate_up_proj.weight.t()).chunk(2, dim=-1)
    else:
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


def test_a_gate_needs_a_shared_expert():
    with pytest.raises(ValueError, match="weighs a shared expert, and there is none"):
        MoELayer(TopKRouter(HIDDEN, 4, 2), GroupedSwiGLU(4, HIDDEN, INTERMEDIATE), shared_gate=True)


@pytest.mark.parametrize("has_shared", [False, True])
def test_what_padding_holds_reaches_nothing(has_shared):
    layer = make_layer(4, 2)
    if has_shared:
        layer = MoELayer(layer.router, layer.experts, shared=SwiGLU(HIDDEN, 3).double(), shared_gate=True).double()
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, False, False], [False] * 5])
    spoiled = x.detach().masked_fill(~mask[..., None], torch.nan).requires_grad_()
    for tokens in (x, spoiled):
        layer.zero_grad()
        out = layer(tokens, mask=mask)
        out.square().sum().backward()
        assert (out[~mask] == 0).all()
        assert (tokens.grad[~mask] == 0).all()
        alone = layer(x[:1, :3])
        torch.testing.assert_close(out[:1, :3], alone, rtol=1e-12, atol=1e-12)
        expected = torch.autograd.grad(alone.square().sum(), list(layer.parameters()))
        for parameter, gradient in zip(layer.parameters(), expected):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
    assert layer.expert_load.sum() == 2 * 2 * 3 * 2


def test_biases_and_a_plain_activation_in_bf16_are_right_to_their_dtype():
    activation = PlainGatedActivation(lambda gate, up: F.gelu(gate) * up)
    layer = GroupedSwiGLU(3, 16, 8, activation=activation, bias=True, fused=False).bfloat16()
    exact = GroupedSwiGLU(3, 16, 8, activation=activation, bias=True, fused=False).double()
    exact.load_state_dict(layer.state_dict())
    x, probs = torch.randn(40, 16).bfloat16(), torch.rand(40)
    counts = torch.tensor([13, 0, 27], dtype=torch.int32)
    upstream = torch.randn_like(x)
    found, expected = layer(x, probs, counts), exact(x.double(), probs.double(), counts)
    assert found.dtype == torch.bfloat16
    found.backward(upstream)
    expected.backward(upstream.double())
    assert (found.double() - expected).norm() <= 1e-2 * expected.norm()
    for (name, a), b in zip(layer.named_parameters(), exact.parameters()):
        assert (a.grad.double() - b.grad).norm() <= 2e-2 * b.grad.norm(), name
        assert (a.grad[1] == 0).all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_down_bias_in_bf16_is_weighed_without_being_rounded(fused):
    torch.manual_seed(0)
    layer = GroupedSwiGLU(3, 16, 8, bias=True, fused=fused).bfloat16()
    with torch.no_grad():
        layer.down_proj.zero_()  # what is left is the bias times the probability
    probs = torch.rand(400, requires_grad=True)
    counts = torch.tensor([130, 0, 270], dtype=torch.int32)
    exact = layer.down_bias.double().repeat_interleave(counts, 0) * probs.double()[:, None]
    y = layer(torch.randn(400, 16).bfloat16(), probs, counts)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)  # half a step of its 8 bits
    (found,) = torch.autograd.grad(y, probs, torch.ones_like(y))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), layer.down_bias.double().sum(1).repeat_interleave(counts))


@attrs.frozen(kw_only=True)
class ProductOfBf16(GroupedMMConfig):
    """Takes bf16 only, on any device."""

    kind: ClassVar[str] = "bf16"
    capabilities: ClassVar[Capabilities] = Capabilities(dtypes=frozenset({torch.bfloat16}))

    def build(self):
        def product(x, weight, counts):
            assert x.dtype == weight.dtype == torch.bfloat16
            return EagerGroupedMMConfig().build()(x, weight, counts)

        return product


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_that_of_the_weights(bias):
    torch.manual_seed(0)
    experts = GroupedSwiGLU(4, 16, 8, bias=bias, backend=ProductOfBf16())
    layer = MoELayer(TopKRouter(16, 4, 2, logits_in_fp32=True), experts, shared=SwiGLU(16, 8), shared_gate=True)
    exact = MoELayer(TopKRouter(16, 4, 2), GroupedSwiGLU(4, 16, 8, bias=bias), shared=SwiGLU(16, 8), shared_gate=True)
    exact.load_state_dict(layer.state_dict())
    exact.double()
    x = torch.randn(2, 30, 16, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(x[0], torch.ones(30), torch.tensor([30, 0, 0, 0], dtype=torch.int32)).dtype == torch.bfloat16
        assert layer.shared(x).dtype == torch.bfloat16
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    expected = exact(x64)
    expected.square().sum().backward()
    assert (y.double() - expected).norm() <= 2e-2 * expected.norm()
    for (name, a), b in zip([("x", x), *layer.named_parameters()], [x64, *exact.parameters()]):
        assert a.grad.dtype == torch.float32, name
        assert (a.grad.double() - b.grad).norm() <= 3e-2 * b.grad.norm(), name


def test_autocast_leaves_fp64_alone():
    layer = make_layer(4, 2)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, dtype=torch.bool), r"must have the shape \(2, 3\) of the tokens, found \(3,\)"),
        (torch.ones(2, 3, 1, dtype=torch.bool), r"must have the shape \(2, 3\) of the tokens, found \(2, 3, 1\)"),
        (torch.ones(2, 3, dtype=torch.int64), "must be torch.bool, False for padding, found torch.int64"),
        (torch.ones(2, 3), "must be torch.bool, False for padding, found torch.float32"),
    ],
)
def test_a_mask_that_is_none_of_the_tokens_is_refused(mask, message):
    layer = make_layer(4, 2)
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    for module in (layer, layer.router):
        with pytest.raises(ValueError, match=message):
            module(x, mask=mask)


def test_tokens_of_another_size_are_refused():
    layer = make_layer(4, 2)
    x = torch.randn(2, 4, HIDDEN // 2, dtype=torch.float64)  # as many numbers as 4 tokens have
    for module in (layer, layer.router):
        with pytest.raises(ValueError, match=r"must have the size 6 in their last dim, found \(2, 4, 3\)"):
            module(x)


def test_rows_for_another_number_of_experts_are_refused():
    experts = make_layer(4, 2).experts
    counts = torch.tensor([1, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="rows come for 2 experts and the parameters hold 4"):
        experts(torch.randn(2, HIDDEN, dtype=torch.float64), torch.ones(2), counts)


def test_a_compiled_layer_equals_eager():
    torch.compiler.reset()
    layer = make_layer(4, 2)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = [x, *layer.parameters()]
    found, expected = compiled(x), layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), weights) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@attrs.frozen(kw_only=True)
class TorchAnywhere(GroupedMMConfig):
    """torch's product on any device."""

    kind: ClassVar[str] = "torch anywhere"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def build(self):
        return TorchGroupedMMConfig().build()


@pytest.mark.parametrize("bias", [False, True])
def test_experts_between_dispatch_and_combine_are_one_graph(bias):
    torch.compiler.reset()
    torch.manual_seed(0)
    experts = GroupedSwiGLU(3, 8, 8, bias=bias, backend=TorchAnywhere()).bfloat16()  # torch 2.11 traces no other
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, backend=counter, fullgraph=True, dynamic=True)  # before any eager call
    for rows in (5, 9, 16):
        operands = [torch.randn(rows, 8).bfloat16().requires_grad_(), torch.rand(rows, requires_grad=True)]
        counts = torch.tensor([rows - 2, 0, 2], dtype=torch.int32)
        found, expected = compiled(*operands, counts), experts(*operands, counts)
        torch.testing.assert_close(found, expected)
        operands += experts.parameters()
        gradients = [torch.autograd.grad(y.square().sum(), operands) for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=1e-2)
    assert counter.frame_count == 1


def test_a_copy_of_experts_and_a_pickled_one_are_the_same():
    experts = GroupedSwiGLU(3, 8, 8, backend=TorchAnywhere())
    operands = torch.randn(4, 8), torch.rand(4), torch.tensor([1, 0, 3], dtype=torch.int32)
    expected = experts(*operands)
    for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(twin(*operands), expected)


def test_a_gradient_of_a_gradient_is_refused():
    layer = make_layer(4, 2)
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.square().sum().backward()


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    activation = PlainGatedActivation(lambda gate, up: F.gelu(gate) * up)
    experts = GroupedSwiGLU(4, HIDDEN, INTERMEDIATE, activation=activation, bias=True)
    layer = MoELayer(TopKRouter(HIDDEN, 4, 2), experts, shared=SwiGLU(HIDDEN, 3)).double()
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    total, weights = layer(x).square().sum(), [x, *layer.parameters()]
    once = torch.autograd.grad(total, weights, retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(total, weights)))
