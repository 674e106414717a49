"""The chunked loss against torch's own on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.models import linear_cross_entropy


def reference(hidden, weight, labels):
    return F.cross_entropy(hidden.flatten(0, -2) @ weight.T, labels.flatten(), reduction="sum")


def sample(shape, vocabulary, hidden_size, ignored, dtype=torch.float64, device="cpu"):
    hidden = torch.randn(*shape, hidden_size, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=dtype, device=device, requires_grad=True)
    labels = torch.randint(vocabulary, shape, device=device)
    labels[torch.rand(shape, device=device) < ignored] = -100
    return hidden, weight, labels


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(1,), (7,), (2, 5), (3, 1, 4)]),
    vocabulary=st.integers(1, 37),
    rows=st.integers(1, 12),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    trained=st.sampled_from([(True, True), (True, False), (False, True)]),
    upstream=st.sampled_from([1.0, -2.5, 0.0]),
)
def test_equals_the_loss_of_all_logits(shape, vocabulary, rows, ignored, trained, upstream):
    hidden, weight, labels = sample(shape, vocabulary, 6, ignored)
    hidden.requires_grad_(trained[0])
    weight.requires_grad_(trained[1])
    loss = linear_cross_entropy(hidden, weight, labels, max_logits_bytes=rows * vocabulary * 8)
    expected = reference(hidden, weight, labels)
    torch.testing.assert_close(loss.sum, expected, rtol=1e-12, atol=1e-12)
    assert loss.weight == (labels != -100).sum()
    inputs = [t for t in (hidden, weight) if t.requires_grad]
    found = torch.autograd.grad(loss.sum * upstream, inputs)
    for gradient, wanted in zip(found, torch.autograd.grad(expected * upstream, inputs)):
        torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    hidden, weight, labels = sample((5,), 7, 3, 0.3)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, max_logits_bytes=1).sum, (hidden, weight)
    )


def test_holds_one_chunk_of_logits_and_nothing_without_gradients(monkeypatch):
    made = []
    plain = torch.Tensor.logsumexp
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda x, *a, **k: made.append(x.shape) or plain(x, *a, **k))
    hidden, weight, labels = sample((10,), 8, 4, 0.0)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, max_logits_bytes=3 * 8 * 8)
    assert made == [(3, 8), (3, 8), (3, 8), (1, 8)]


def test_bf16_is_as_near_to_fp64_as_bf16_allows():
    hidden, weight, labels = sample((64,), 50, 32, 0.1, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, labels, max_logits_bytes=1 << 10)
    expected = reference(*wide, labels)
    assert loss.sum.dtype == torch.float32
    torch.testing.assert_close(loss.sum.double(), expected, rtol=1e-5, atol=0)
    for gradient, wanted in zip(torch.autograd.grad(loss.sum, (hidden, weight)), torch.autograd.grad(expected, wide)):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - wanted).norm() < 2**-7 * wanted.norm()


def test_shapes_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"needs labels \(2, 3\) and a weight \(V, 4\), got labels \(2,\)"):
        linear_cross_entropy(torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(2, dtype=torch.int64))


def test_computes_no_gradient_where_none_is_recorded(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a product for a gradient")

    hidden, weight, labels = sample((10,), 8, 4, 0.0)
    monkeypatch.setattr(torch, "mm", refuse)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(AssertionError, match="a product for a gradient"):
        linear_cross_entropy(hidden, weight, labels)


def test_autocast_narrows_nothing():
    hidden, weight, labels = sample((64,), 50, 32, 0.1, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels).sum
    expected = reference(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    found, wanted = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_one_token_needs_no_batch():
    hidden, weight, _ = sample((), 7, 4, 0.0)
    loss = linear_cross_entropy(hidden, weight, torch.tensor(3))
    torch.testing.assert_close(loss.sum, reference(hidden[None], weight, torch.tensor([3])))


def test_dtypes_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"hidden is torch.bfloat16 and the weight is torch.float32: cast"):
        linear_cross_entropy(torch.ones(2, 4).bfloat16(), torch.ones(5, 4), torch.ones(2, dtype=torch.int64))


@pytest.mark.gpu
def test_cuda_bf16_against_fp64():
    hidden, weight, labels = sample((4, 500), 3001, 256, 0.1, torch.bfloat16, "cuda")
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, labels, max_logits_bytes=1 << 20)
    expected = reference(*wide, labels)
    torch.testing.assert_close(loss.sum.double(), expected, rtol=1e-5, atol=0)
    for gradient, wanted in zip(
        torch.autograd.grad(loss.sum * 0.5, (hidden, weight)), torch.autograd.grad(expected * 0.5, wide)
    ):
        assert (gradient.double() - wanted).norm() < 2**-7 * wanted.norm()
