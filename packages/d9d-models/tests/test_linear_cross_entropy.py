"""The chunked loss against torch's own functions on whole logits in fp64."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.models import linear_cross_entropy, token_cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from loss_cases import OPTIONS, case, each_summed, logits_of, oracle, summed, weighted_sum


@settings(deadline=None, max_examples=80)
@given(
    shape=st.sampled_from([(1,), (7,), (2, 5), (3, 1, 4), (0,)]),
    classes=st.integers(3, 37),
    rows=st.integers(1, 12),
    size=st.sampled_from([6, 12]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    trained=st.sampled_from([(True, True), (True, False), (False, True)]),
    upstream=st.sampled_from([1.0, -2.5, 0.0]),
    options=OPTIONS,
    bias=st.booleans(),
    weighted=st.booleans(),
)
def test_equals_the_loss_of_all_logits(shape, classes, rows, size, ignored, trained, upstream, options, bias, weighted):
    index = options.get("ignore_index", -100)
    sample = case(shape, classes, size=size, ignored=ignored, index=index, bias=bias, weighted=weighted)
    sample.hidden.requires_grad_(trained[0])
    sample.weight.requires_grad_(trained[1])
    loss = linear_cross_entropy(
        sample.hidden,
        sample.weight,
        sample.labels,
        bias_V=sample.bias,
        token_weights=sample.token_weights,
        max_logits_bytes=rows * classes * 8,
        **options,
    )
    expected = weighted_sum(oracle(sample, **options), sample)
    torch.testing.assert_close(loss.sum, expected, rtol=1e-12, atol=1e-12)
    kept = sample.labels != index
    torch.testing.assert_close(loss.weight, kept.sum() if not weighted else sample.token_weights[kept].sum())
    assert loss.weight.dtype == (torch.float64 if weighted else torch.int64)
    found = torch.autograd.grad(loss.sum * upstream, sample.operands)
    wanted = torch.autograd.grad(expected * upstream, sample.operands, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"z_loss": 0.1}, {"soft_cap": 2.0}])
def test_gradcheck(options):
    sample = case((5,), 7, bias=True)

    def total(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, sample.labels, bias_V=bias, max_logits_bytes=1, **options).sum

    def each(hidden, weight, bias):
        return token_cross_entropy(hidden, weight, sample.labels, bias_V=bias, max_logits_bytes=1, **options)

    assert torch.autograd.gradcheck(total, sample.operands)
    assert torch.autograd.gradcheck(each, sample.operands)


def test_shifted_labels_are_those_of_the_next_position():
    sample = case((2, 6), 9)
    found = linear_cross_entropy(sample.hidden, sample.weight, sample.labels, shift=True)
    wanted = linear_cross_entropy(sample.hidden[:, :-1], sample.weight, sample.labels[:, 1:])
    torch.testing.assert_close(found.sum, wanted.sum)
    assert found.weight == wanted.weight


def test_a_loss_may_be_differentiated_twice_and_after_that_once_more():
    sample = case((5,), 7)
    loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum
    first = torch.autograd.grad(loss * 3, sample.operands, retain_graph=True)
    [of_hidden] = torch.autograd.grad(loss * 3, [sample.hidden], retain_graph=True)
    last = torch.autograd.grad(loss * 3, sample.operands)
    assert torch.equal(of_hidden, first[0])
    torch.testing.assert_close(last, first, rtol=0, atol=0)


def test_one_token_needs_no_batch():
    sample = case((1,), 7)
    loss = linear_cross_entropy(sample.hidden[0], sample.weight, torch.tensor(3))
    torch.testing.assert_close(loss.sum, F.cross_entropy(logits_of(sample), torch.tensor([3])))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}])
@pytest.mark.parametrize("ignored", [0.5, 1.0])
def test_what_is_ignored_poisons_nothing(value, options, ignored):  # case 7
    sample = case((20,), 7, bias=True, ignored=ignored)
    clean = [
        torch.autograd.grad(
            f(sample.hidden, sample.weight, sample.labels, bias_V=sample.bias, **options), sample.operands
        )
        for f in (summed, each_summed)
    ]
    with torch.no_grad():
        sample.hidden[sample.labels == -100] = value
    for f, wanted in zip((summed, each_summed), clean):
        loss = f(sample.hidden, sample.weight, sample.labels, bias_V=sample.bias, **options)
        assert loss.isfinite()
        torch.testing.assert_close(torch.autograd.grad(loss, sample.operands), wanted)


@pytest.mark.parametrize("function", [summed, each_summed])
def test_a_second_derivative_is_refused(function):
    sample = case((5,), 7)
    loss = function(sample.hidden, sample.weight, sample.labels)
    with pytest.raises(RuntimeError, match=r"no second derivative|no autograd formula"):
        sum(x.square().sum() for x in torch.autograd.grad(loss, sample.operands, create_graph=True)).backward()


def test_weights_are_shifted_with_their_labels():
    sample = case((2, 6), 9, weighted=True)
    found = linear_cross_entropy(
        sample.hidden, sample.weight, sample.labels, token_weights=sample.token_weights, shift=True
    )
    wanted = linear_cross_entropy(
        sample.hidden[:, :-1], sample.weight, sample.labels[:, 1:], token_weights=sample.token_weights[:, 1:]
    )
    torch.testing.assert_close(found.sum, wanted.sum)
    torch.testing.assert_close(found.weight, wanted.weight)
    with pytest.raises(ValueError, match="shift=True needs labels of at least one dim"):
        linear_cross_entropy(sample.hidden[0, 0], sample.weight, sample.labels[0, 0], shift=True)
