"""Operators and graphs of the loss and of the scores of tokens: fake tensors, opcheck and torch.compile."""

import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from d9d.models import (
    TorchLinearCrossEntropyConfig,
    linear_cross_entropy,
    token_cross_entropy,
    token_entropies,
    token_log_probs,
    top_k_log_probs,
)

sys.path.insert(0, str(Path(__file__).parent))
from loss_cases import case, oracle, summed


def test_fake_tensors_pass():
    with FakeTensorMode():
        sample = case((5,), 7)
        linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum.backward()
        token_log_probs(sample.hidden, sample.weight, sample.labels).sum().backward()
        assert top_k_log_probs(sample.hidden, sample.weight, 2).classes.shape == (5, 2)


@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, False, False), (False, True, True), (False, False, False)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_operators_are_as_torch_wants_them(needs, has_bias):
    hidden, weight = torch.randn(5, 6).bfloat16(), torch.randn(7, 6)
    bias, labels = torch.randn(7).bfloat16() if has_bias else None, torch.randint(7, (5,))
    needs = [*needs[:2], needs[2] and has_bias]
    checks = ("test_schema", "test_faketensor")
    options = (-100, 0.1, 1e-2, 3.0, None, 0, 2)  # as of `LossOptions`, no split vocabulary, two tokens a chunk
    common = (hidden, weight, bias, labels)
    dtypes = (torch.float32, torch.float32)  # of logits and of the weight's gradient
    for operator, arguments in {
        torch.ops.d9d.linear_cross_entropy.default: (*common, None, *options, needs, "torch", *dtypes),
        torch.ops.d9d.token_scores.default: (*common, *options),
        torch.ops.d9d.token_scores_backward.default: (torch.rand(5), torch.rand(5, 1), *common, *options, needs),
        torch.ops.d9d.top_k_log_probs.default: (hidden, weight, 3, bias, 3.0, None, 0, 2),
    }.items():
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_token_functions_compile_to_one_graph_over_token_counts():
    def score(hidden, weight, labels, bias):
        losses = token_cross_entropy(hidden * 2, weight, labels, bias_V=bias, label_smoothing=0.1, z_loss=1e-2)
        best = top_k_log_probs(hidden, weight, 3)
        return (losses * best.log_probs[:, 0]).sum() + token_entropies(hidden, weight, soft_cap=3.0).sum()

    torch._dynamo.reset()
    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(score, fullgraph=True, backend=frames, dynamic=True)
    for tokens in (5, 8, 13, 21, 34):
        sample = case((tokens,), 11, bias=True)
        arguments = (sample.hidden, sample.weight, sample.labels, sample.bias)
        found, expected = compiled(*arguments), score(*arguments)
        torch.testing.assert_close(found, expected)
        pairs = (torch.autograd.grad(x, sample.operands) for x in (found, expected))
        torch.testing.assert_close(*pairs)
    assert frames.frame_count <= 2  # torch 2.11 compiles a second time, and then no more


def test_compiles_with_settings_of_a_backend_and_a_weight_that_is_transposed(monkeypatch):
    asked = []
    build = TorchLinearCrossEntropyConfig.build
    monkeypatch.setattr(TorchLinearCrossEntropyConfig, "build", lambda self: asked.append(self) or build(self))
    sample = case((5,), 7)
    weight = sample.weight.detach().T.contiguous().T.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(summed, fullgraph=True, backend="aot_eager")
    first, second = TorchLinearCrossEntropyConfig(), TorchLinearCrossEntropyConfig()
    for config in (first, second, first):
        found = compiled(sample.hidden, weight, sample.labels, backend=config)
        [gradient] = torch.autograd.grad(found, [weight])
        torch.testing.assert_close(gradient, torch.autograd.grad(oracle(sample).sum(), [sample.weight])[0])
    assert any(config is first for config in asked)
    assert any(config is second for config in asked)  # not the graph of the first


def test_compiles_under_autocast():
    def score(hidden, weight, labels):
        total = linear_cross_entropy(hidden * 2, weight, labels).sum
        return total + token_entropies(hidden, weight).sum() + top_k_log_probs(hidden, weight, 2).log_probs.sum()

    torch._dynamo.reset()
    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    sample = case((9,), 11).as_dtype(torch.float32)
    found = []
    for function in (compiled, score):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(function(sample.hidden, sample.weight, sample.labels))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(x, sample.operands) for x in found))


def test_compiles_to_one_graph_without_recompilation_over_token_counts():
    def mean(hidden, weight, labels, bias):
        loss = linear_cross_entropy(hidden * 2, weight, labels, bias_V=bias, label_smoothing=0.1, z_loss=1e-2)
        return loss.sum / loss.weight

    torch._dynamo.reset()
    frames = CompileCounter()
    compiled = torch.compile(mean, fullgraph=True, backend=frames, dynamic=True)
    for tokens in (5, 8, 13, 21, 34):
        sample = case((tokens,), 11, bias=True)
        arguments = (sample.hidden, sample.weight, sample.labels, sample.bias)
        found, expected = compiled(*arguments), mean(*arguments)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, sample.operands), torch.autograd.grad(expected, sample.operands)
        )
    assert frames.frame_count == 1
