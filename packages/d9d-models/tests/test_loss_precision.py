"""Narrow dtypes lose no more than their own rounding: bf16, autocast and sums in fp32, against fp64."""

import sys
from pathlib import Path

import attrs
import pytest
import torch
import torch.nn.functional as F

from d9d.models import TorchLinearCrossEntropyConfig, linear_cross_entropy, token_cross_entropy
from d9d.models._cross_entropy._chunked import ChunkedLinearCrossEntropy

sys.path.insert(0, str(Path(__file__).parent))
from loss_cases import Largest, case, oracle


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}])
def test_bf16_is_as_near_to_fp64_as_bf16_allows(options):
    sample = case((64,), 50, size=32, bias=True).as_dtype(torch.bfloat16)
    loss = linear_cross_entropy(
        sample.hidden, sample.weight, sample.labels, bias_V=sample.bias, max_logits_bytes=1 << 10, **options
    )
    exact = sample.as_dtype(torch.float64)
    expected = oracle(exact, **options).sum()
    assert loss.sum.dtype == torch.float32
    torch.testing.assert_close(loss.sum.double(), expected, rtol=1e-5, atol=0)
    assert_near(torch.autograd.grad(loss.sum, sample.operands), torch.autograd.grad(expected, exact.operands))


def assert_near(found, wanted, tolerance=2**-7):
    for gradient, truth in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - truth).norm() < tolerance * truth.norm()


class RoundsLogits(TorchLinearCrossEntropyConfig):
    """The formulas of torch where the backends of a GPU have theirs: on logits in the dtype of the hidden states."""

    def build(self):
        return ChunkedLinearCrossEntropy(functions="torch", rounds_logits=True)


def in_gaps(x):
    """The same numbers, with others between them."""
    return x.repeat_interleave(2, 1)[:, ::2]


@pytest.mark.parametrize("tokens", [64, 65])  # the last that the fp32 gradient of a class has room for, and one more
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}])
def test_narrow_logits_within_a_wide_gradient_give_what_they_give_in_one_piece(tokens, dtype, options):
    sample = case((tokens,), 50, size=32, bias=True).as_dtype(dtype)
    kept = {"bias_V": sample.bias, "backend": RoundsLogits()}
    found, wanted = (
        linear_cross_entropy(
            sample.hidden, sample.weight, sample.labels, max_logits_bytes=memory, **kept, **options
        ).sum
        for memory in (1 << 10, 1 << 20)
    )
    torch.testing.assert_close(found, wanted)
    pairs = zip(torch.autograd.grad(found, sample.operands), torch.autograd.grad(wanted, sample.operands), strict=True)
    assert all((a - b).norm() <= 2**-8 * b.norm() for a, b in pairs)


def test_a_weight_of_no_class_may_lie_in_gaps():
    hidden, weight = torch.randn(12, 8).bfloat16(), in_gaps(torch.empty(0, 8).bfloat16()).requires_grad_()
    ignored = torch.full((12,), -100)
    loss = linear_cross_entropy(hidden, weight, ignored, backend=RoundsLogits(), max_logits_bytes=0).sum
    assert torch.autograd.grad(loss, weight)[0].shape == (0, 8)


def test_a_thousand_chunks_lose_nothing_of_the_weights_gradient_to_bf16():
    sample = case((1000,), 8, size=4).as_dtype(torch.bfloat16)
    loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels, max_logits_bytes=1)
    exact = sample.as_dtype(torch.float64)
    [found], [wanted] = (
        torch.autograd.grad(x, [s.weight]) for x, s in ((loss.sum, sample), (oracle(exact).sum(), exact))
    )
    # as the gradient of logits is rounded, and the sum once more
    assert (found.double() - wanted).norm() < 2**-8 * wanted.norm()


def loss_of(hidden, weight, labels, bias):
    return linear_cross_entropy(hidden, weight, labels, bias_V=bias, max_logits_bytes=1 << 11).sum


def losses_of(hidden, weight, labels, bias):
    return token_cross_entropy(hidden, weight, labels, bias_V=bias, max_logits_bytes=1 << 11).sum()


def as_rounded(sample):
    """The case in fp64 with hidden states and weight, but not the bias, of what bf16 keeps of them."""
    exact = sample.as_dtype(torch.bfloat16).as_dtype(torch.float64)
    return attrs.evolve(exact, bias=sample.bias.detach().double().requires_grad_())


@pytest.mark.parametrize("function", [loss_of, losses_of])
@pytest.mark.parametrize("narrows", ["autocast", "hidden states"])
def test_of_an_fp32_weight_only_the_factor_of_products_is_narrowed(function, narrows):
    sample = case((64,), 50, size=32, bias=True).as_dtype(torch.float32)
    expected = oracle(as_rounded(sample)).sum()
    wanted = torch.autograd.grad(oracle(exact := as_rounded(sample)).sum(), exact.operands)
    hidden = sample.hidden if narrows == "autocast" else sample.hidden.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrows == "autocast"):
        found = function(hidden, sample.weight, sample.labels, sample.bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)  # logits and softmax are not narrow
    for gradient, truth in zip(torch.autograd.grad(found, sample.operands), wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient.double() - truth).norm() < 2**-8 * truth.norm()  # as the gradient of logits is rounded
        if len(gradient) == 50:
            assert not torch.equal(gradient, gradient.bfloat16().float())


def test_autocast_is_for_narrower_numbers_than_fp64():
    sample = case((9,), 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum
    torch.testing.assert_close(loss, oracle(sample).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("weight_dtype", ["fp32", "bf16 with gradients in fp32", "bf16 with any gradients"])
def test_the_fp32_sum_over_chunks_is_the_gradient_where_that_may_be_fp32(weight_dtype):
    sample = case((64,), 50, size=32, bias=True).as_dtype(torch.bfloat16)
    if weight_dtype == "fp32":
        sample = attrs.evolve(
            sample, weight=sample.weight.detach().float().requires_grad_(), bias=sample.bias.detach().float()
        )
    else:
        sample.weight.grad_dtype = None if "any" in weight_dtype else torch.float32
    saved = []

    def keep(x):
        if x.shape == sample.weight.shape:
            saved.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = loss_of(sample.hidden, sample.weight, sample.labels, sample.bias)
    with Largest() as largest:
        loss.backward()
    gradient = sample.weight.grad
    assert [gradient.data_ptr()] == saved  # made in forward, handed out as it is
    assert largest.made < sample.weight.nbytes
    exact = sample.as_dtype(torch.float64)
    [wanted] = torch.autograd.grad(oracle(exact).sum(), [exact.weight])
    assert gradient.dtype == torch.float32
    assert (gradient.double() - wanted).norm() < 2**-8 * wanted.norm()
    assert not torch.equal(gradient, gradient.bfloat16().float())
    sample.hidden.grad = sample.weight.grad = None
    losses_of(sample.hidden, sample.weight, sample.labels, sample.bias).backward()
    torch.testing.assert_close(sample.weight.grad, gradient, rtol=1e-2, atol=1e-3)
    assert sample.weight.grad.dtype == torch.float32


def test_a_tied_weight_sums_up_its_gradients_in_fp32_where_it_may():
    table = (0.3 * torch.randn(50, 32)).bfloat16().requires_grad_()
    ids, labels = torch.randint(50, (2, 64))
    exact = table.detach().double().requires_grad_()
    F.cross_entropy(F.embedding(ids, exact) @ exact.T, labels, reduction="sum").backward()
    for takes, dtype in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (None, torch.float32)):
        table.grad, table.grad_dtype = None, takes
        linear_cross_entropy(F.embedding(ids, table), table, labels, max_logits_bytes=1 << 11).sum.backward()
        assert table.grad.dtype == dtype
        assert (table.grad.double() - exact.grad).norm() < 2**-7 * exact.grad.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_upstream_gradient_is_not_rounded_to_the_dtype(dtype):
    sample = case((64,), 50, ignored=0.0).as_dtype(dtype)
    loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum
    unscaled = torch.autograd.grad(loss, sample.operands, retain_graph=True)
    for factor in (1 + 0.49 * torch.finfo(dtype).eps, 1e-3):  # at best in the middle of two numbers of the dtype
        wanted = (unscaled[0].float() * factor).to(dtype)
        for keeps in (True, False):  # the second time in place
            loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum
            [found] = torch.autograd.grad(loss * factor, [sample.hidden], retain_graph=keeps)
            assert torch.equal(found, wanted)


def test_a_loss_scale_beyond_fp16_is_one():
    sample = case((64,), 50).as_dtype(torch.float16)
    loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels)
    mean = loss.sum / loss.weight / 100
    found = torch.autograd.grad(mean * 2.0**16 * 10, sample.operands)
    assert all(gradient.isfinite().all() for gradient in found)
