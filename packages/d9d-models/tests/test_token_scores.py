"""What each token gets, loss, entropy and best classes, against torch's own functions on whole logits in fp64."""

import sys
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.models import token_cross_entropy, token_entropies, token_log_probs, top_k_log_probs

sys.path.insert(0, str(Path(__file__).parent))
from loss_cases import OPTIONS, case, logits_of, oracle


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(1,), (7,), (2, 5), (0,)]),
    classes=st.integers(3, 37),
    rows=st.integers(1, 12),
    options=OPTIONS,
    bias=st.booleans(),
)
def test_tokens_get_losses_entropies_and_best_classes_of_all_logits(shape, classes, rows, options, bias):
    sample = case(shape, classes, index=options.get("ignore_index", -100), bias=bias)
    chunked = {"bias_V": sample.bias, "max_logits_bytes": rows * classes * 8}
    losses = token_cross_entropy(sample.hidden, sample.weight, sample.labels, **chunked, **options)
    upstream = torch.randn(shape, dtype=torch.float64)
    expected = oracle(sample, **options).view(shape)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad((x * upstream).sum(), sample.operands) for x in (losses, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    chunked["soft_cap"] = options.get("soft_cap")
    log_probs = logits_of(sample, options.get("soft_cap")).log_softmax(-1).view(*shape, classes)
    entropies = token_entropies(sample.hidden, sample.weight, **chunked)
    expected = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(entropies, expected, rtol=1e-10, atol=1e-12)
    found, wanted = (torch.autograd.grad((x * upstream).sum(), sample.operands) for x in (entropies, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)

    best = top_k_log_probs(sample.hidden, sample.weight, 3, **chunked)
    torch.testing.assert_close(best.log_probs, log_probs.topk(3).values.detach(), rtol=1e-10, atol=1e-12)
    assert torch.equal(best.classes, log_probs.topk(3).indices)


def test_log_probabilities_are_those_of_the_labels():
    sample = case((9,), 11)
    found = token_log_probs(sample.hidden, sample.weight, sample.labels)
    kept = sample.labels != -100
    wanted = logits_of(sample).log_softmax(-1)[kept, sample.labels[kept]]
    torch.testing.assert_close(found[kept], wanted)
    assert (found[~kept] == 0).all()


def test_a_class_that_cannot_be_adds_nothing_to_an_entropy():
    sample = case((5,), 7, bias=True)
    with torch.no_grad():
        sample.bias[-1] = -torch.inf
    found = token_entropies(sample.hidden, sample.weight, bias_V=sample.bias).sum()
    wanted = token_entropies(sample.hidden, sample.weight[:-1], bias_V=sample.bias[:-1]).sum()
    torch.testing.assert_close(found, wanted)
    pairs = (torch.autograd.grad(x, sample.operands) for x in (found, wanted))
    torch.testing.assert_close(*pairs)
