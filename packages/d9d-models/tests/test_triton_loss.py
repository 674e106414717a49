"""The Triton backend: in the interpreter on the CPU, and on a GPU against fp64, torch and cut-cross-entropy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from d9d.models import (
    CutLinearCrossEntropyConfig,
    LinearCrossEntropyNeed,
    TritonLinearCrossEntropyConfig,
    linear_cross_entropy,
    token_cross_entropy,
)

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}


def test_the_kernel_is_right_in_the_interpreter():
    script = Path(__file__).with_name("triton_loss_on_cpu.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "right\n"


def draw(tokens=2000, classes=3001, size=256, dtype=torch.bfloat16):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(classes, size, device="cuda") * 0.1).to(dtype).requires_grad_()
    bias = torch.randn(classes, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(classes, (tokens,), device="cuda")
    labels[::7] = -100
    return hidden, weight, bias, labels, torch.rand(tokens, device="cuda")


def oracle(operands, labels, *, label_smoothing=0.0, z_loss=0.0, soft_cap=None):
    hidden, weight, bias = operands
    logits = hidden @ weight.T + bias
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    losses = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
    return losses + z_loss * logits.logsumexp(-1).square() * (labels != -100)


def transposed(x):
    """The same numbers, a column after the other."""
    return x.detach().T.contiguous().T.requires_grad_()


def in_gaps(x):
    """The same numbers, with others between them."""
    return x.detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()


@pytest.mark.gpu
@pytest.mark.parametrize("lay_out", [lambda x: x, transposed, in_gaps], ids=["contiguous", "transposed", "gaps"])
@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("tokens", [2000, 500])  # in chunks, and in the memory of the weight's gradient
@pytest.mark.parametrize(
    "backend", ["torch", TritonLinearCrossEntropyConfig(), TritonLinearCrossEntropyConfig(rounds_weight_gradient=True)]
)
def test_loss_and_gradients_are_as_near_to_fp64_as_bf16_allows(backend, tokens, options, lay_out):  # case 49
    *operands, labels, weights = draw(tokens)
    operands[:2] = [lay_out(x) for x in operands[:2]]
    exact = [x.detach().double().requires_grad_() for x in operands]
    wanted = (oracle(exact, labels, **options) * weights).sum()
    hidden, weight, bias = operands
    found = linear_cross_entropy(
        hidden, weight, labels, bias_V=bias, token_weights=weights, backend=backend, max_logits_bytes=1 << 20, **options
    )
    torch.testing.assert_close(found.sum.double(), wanted, rtol=1e-4, atol=0)
    pairs = zip(torch.autograd.grad(found.sum * 0.5, operands), torch.autograd.grad(wanted * 0.5, exact))
    for gradient, truth in pairs:
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - truth).norm() < 2**-6 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3000, 2048])  # in chunks, and in the memory of the weight's gradient
@pytest.mark.parametrize("weight_is", ["fp32", "bf16 with an fp32 gradient"])
def test_the_fp32_sum_is_the_gradient_and_nothing_of_its_size_is_held_besides(weight_is, tokens):
    hidden, weight, _, labels, _ = draw(tokens, classes=32_000, size=1024)
    rounded = weight.nbytes if weight_is == "fp32" else 0  # the factor of products
    if rounded:
        weight = weight.detach().float().requires_grad_()
    else:
        weight.grad_dtype = torch.float32
    logits = 8 << 20

    def step():
        linear_cross_entropy(hidden, weight, labels, backend="triton", max_logits_bytes=logits).sum.backward()

    step()  # compiles, and takes the workspace of products
    found = weight.grad
    assert found.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum").backward()
    assert (found.double() - exact[1].grad).norm() < 2**-7 * exact[1].grad.norm()
    gradients = hidden.nbytes + found.nbytes
    hidden.grad = weight.grad = found = exact = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    beyond = torch.cuda.max_memory_allocated() - before - gradients
    assert beyond < rounded + 2 * logits  # 62 MiB of bf16 and 125 of fp32 are the weight's


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_gradient_is_scaled_in_place_as_torch_does(factor):
    upstream = torch.tensor(factor, device="cuda")
    hidden, weight, _, labels, _ = draw()
    for operand in (hidden, weight):
        found, wanted = (
            torch.autograd.grad(
                linear_cross_entropy(hidden, weight, labels, backend=backend).sum, operand, upstream, retain_graph=keeps
            )
            for backend, keeps in ((TritonLinearCrossEntropyConfig(rounds_weight_gradient=True), x) for x in (0, 1))
        )
        assert torch.equal(*found, *wanted)


@pytest.mark.gpu
def test_tokens_get_their_losses_on_a_gpu():
    *operands, labels, weights = draw()
    exact = [x.detach().double().requires_grad_() for x in operands]
    wanted = oracle(exact, labels, **EVERYTHING)
    hidden, weight, bias = operands
    found = token_cross_entropy(hidden, weight, labels, bias_V=bias, max_logits_bytes=2 << 20, **EVERYTHING)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(x @ weights.to(x.dtype), y) for x, y in ((found, operands), (wanted, exact)))
    for gradient, truth in zip(found, wanted):
        assert (gradient.double() - truth).norm() < 2**-6 * truth.norm()


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements_are_right():  # case 24
    tokens, classes = 9000, 250_000
    hidden, weight, _, labels, _ = draw(tokens, classes, 16)
    with torch.no_grad():
        kept = {"backend": "triton", "max_logits_bytes": tokens * classes * 2}
        found = linear_cross_entropy(hidden, weight, labels, **kept).sum
        parts = [
            linear_cross_entropy(h, weight, y, backend="triton").sum
            for h, y in zip(hidden.split(1000), labels.split(1000))
        ]
    torch.testing.assert_close(found, torch.stack(parts).sum(), rtol=1e-6, atol=0)
    gradient = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, **kept).sum, hidden)[0]
    last = torch.autograd.grad(
        linear_cross_entropy(hidden[-1000:], weight, labels[-1000:], backend="triton").sum, hidden
    )
    torch.testing.assert_close(gradient[-1000:], last[0][-1000:])


@pytest.mark.gpu
def test_logits_beyond_two_to_the_31_elements_within_the_gradient_are_right():  # case 24
    hidden, weight, _, labels, _ = draw(tokens=5000, classes=300_000, size=4096)
    weight.grad_dtype = torch.float32
    kept = {"backend": TritonLinearCrossEntropyConfig()}
    whole = labels.numel() * len(weight) * 2
    found, wanted = (
        torch.autograd.grad(
            linear_cross_entropy(hidden, weight, labels, max_logits_bytes=memory, **kept).sum, (hidden, weight)
        )
        for memory in (whole // 8, whole)
    )
    for gradient, expected in zip(found, wanted):
        last = slice(-1000, None)
        assert (gradient[last] - expected[last]).norm() < 2**-8 * expected[last].norm()


@pytest.mark.gpu
def test_more_blocks_of_classes_than_a_dim_of_a_grid_has_are_right():
    hidden, weight, _, labels, _ = draw(tokens=30, classes=65_536 * 32 + 1, size=16)
    found, wanted = (
        torch.autograd.grad(
            linear_cross_entropy(
                hidden, weight, labels, backend="triton", max_logits_bytes=2 * tokens * len(weight)
            ).sum,
            (hidden, weight),
        )
        for tokens in (8, 30)  # in the memory of the weight's gradient, and side by side
    )
    assert all((a - b).norm() < 2**-6 * b.norm() for a, b in zip(found, wanted))


@pytest.mark.gpu
def test_a_gpu_that_is_not_the_current_one_will_do():
    if torch.cuda.device_count() < 2:
        pytest.skip("takes 2 GPUs")
    hidden, weight, _, labels, _ = (x.to("cuda:1") for x in draw(500))
    for memory in (1 << 20, 64 << 20):
        operands = [x.detach().requires_grad_() for x in (hidden, weight)]
        losses = [
            linear_cross_entropy(*operands, labels, backend=backend, max_logits_bytes=memory).sum
            for backend in ("triton", "torch")
        ]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
        pairs = zip(*(torch.autograd.grad(x * 0.5, operands) for x in losses))
        assert all((a - b).norm() < 2**-6 * b.norm() for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_label_of_no_class_is_seen_on_a_gpu(backend):
    hidden, weight, _, labels, _ = draw(64, 37, 16)
    labels[1] = 37
    assert linear_cross_entropy(hidden, weight, labels, backend=backend).sum.isnan()
    assert token_cross_entropy(hidden, weight, labels).isnan().nonzero().tolist() == [[1]]


@pytest.mark.gpu
def test_the_host_never_waits():
    hidden, weight, bias, labels, weights = draw()

    def step():
        kept = {"bias_V": bias, "token_weights": weights, "backend": "triton"}
        linear_cross_entropy(hidden, weight, labels, **kept, **EVERYTHING).sum.backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cut_cross_entropy_computes_the_same():
    need = LinearCrossEntropyNeed(device_type="cuda", dtype=torch.bfloat16)
    if CutLinearCrossEntropyConfig().refusal(need) is not None:
        pytest.skip("takes d9d-models[cce]")
    hidden, weight, _, labels, weights = draw()
    found, wanted = (
        linear_cross_entropy(hidden, weight, labels, token_weights=weights, backend=backend, soft_cap=5.0).sum
        for backend in ("cce", "torch")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0)
    pairs = zip(torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight)))
    for gradient, truth in pairs:
        assert (gradient - truth).norm() < 2**-5 * truth.norm()


@pytest.mark.gpu
def test_compiles_to_one_graph_on_a_gpu():
    hidden, weight, bias, labels, _ = draw()

    def mean(hidden, weight, bias):
        loss = linear_cross_entropy(hidden, weight, labels, bias_V=bias, backend="triton")
        return loss.sum / loss.weight

    operands = (hidden, weight, bias)
    found, wanted = torch.compile(mean, fullgraph=True)(*operands), mean(*operands)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, operands), torch.autograd.grad(wanted, operands))
