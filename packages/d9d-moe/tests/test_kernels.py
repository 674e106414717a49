"""Rows and activations: kernels in Triton's interpreter, references against loops, and (gpu) kernels on CUDA."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.moe import silu_mul, silu_mul_pair
from d9d.moe._rows import (
    gather_rows,
    gather_rows_with_probs,
    group_by_destination,
    ranks_of_tokens,
    sum_rows,
)


def test_the_kernels_are_right_in_the_interpreter():
    script = Path(__file__).with_name("kernels_on_cpu.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "right\n"


@st.composite
def slots(draw):
    tokens, per_token, destinations = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    some = st.lists(st.integers(-1, destinations), min_size=per_token, max_size=per_token)
    ids = draw(st.lists(some, min_size=tokens, max_size=tokens))
    return torch.tensor(ids, dtype=torch.int64).view(tokens, per_token), destinations


@settings(max_examples=60, deadline=None)
@given(slots())
def test_rows_are_by_destination_then_by_token_and_sums_are_over_them(drawn):
    ids, destinations = drawn
    wanted = sorted(
        (int(d), slot) for slot, d in enumerate(ids.flatten()) if 0 <= d < destinations
    )  # (destination, slot) of each row
    index = group_by_destination(ids, destinations, rows=len(wanted))
    assert [int((index.row_TK.flatten() == row).nonzero()) for row in range(len(wanted))] == [s for _, s in wanted]
    assert index.count_D.tolist() == [sum(d == here for d, _ in wanted) for here in range(destinations)]
    shifted = group_by_destination(ids + 5, destinations, rows=len(wanted), first=5)
    assert torch.equal(index.row_TK, shifted.row_TK)

    x = torch.randn(len(ids), 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(ids.shape, dtype=torch.float64, requires_grad=True)
    token = torch.tensor([slot // ids.shape[1] for _, slot in wanted], dtype=torch.int64)
    slot = torch.tensor([slot for _, slot in wanted], dtype=torch.int64)
    rows, probs = gather_rows_with_probs(x, weights, index)
    assert torch.equal(rows, x[token])
    assert torch.equal(rows, gather_rows(x, index))
    assert torch.equal(probs, weights.flatten()[slot])
    zeros = torch.zeros(len(ids), 3, dtype=torch.float64)
    torch.testing.assert_close(sum_rows(rows, index), zeros.index_add(0, token, x[token]))
    weighted = sum_rows(rows, index, weights_TK=weights)
    plain = zeros.index_add(0, token, x[token] * weights.flatten()[slot, None])
    torch.testing.assert_close(weighted, plain)

    upstream = torch.randn_like(weighted)
    found = torch.autograd.grad([weighted, probs], [x, weights], [upstream, probs.detach()])
    expected = torch.autograd.grad([plain, weights.flatten()[slot]], [x, weights], [upstream, probs.detach()])
    torch.testing.assert_close(found, expected)


def activation_oracle(gate, up, probs):
    return F.silu(gate) * up * probs[:, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_activation_is_rounded_once(dtype):
    torch.manual_seed(0)
    gate_up = torch.randn(6, 2 * 5).to(dtype).requires_grad_()
    probs = torch.rand(6, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    gate, up = gate_up.double().chunk(2, dim=1)
    wanted = activation_oracle(gate, up, probs.double())
    halves = [half.clone() for half in gate_up.chunk(2, dim=1)]
    unweighted = activation_oracle(gate, up, torch.ones(6))
    same = functools.partial(torch.testing.assert_close, rtol=1e-14 if dtype == torch.float64 else 0, atol=0)
    same(silu_mul(gate_up, probs), wanted.to(dtype))
    same(silu_mul_pair(*halves, probs), wanted.to(dtype))
    same(silu_mul(gate_up), unweighted.to(dtype))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: silu_mul(torch.ones(3, 7)), r"found both in the odd shape \(3, 7\)"),
        (lambda: silu_mul(torch.ones(3, 8), torch.ones(2)), r"rows \(3, 8\) need as many probabilities, found \(2,\)"),
        (lambda: silu_mul_pair(torch.ones(3, 4), torch.ones(3, 1)), r"one shape, found \(3, 4\) and \(3, 1\)"),
        (lambda: silu_mul_pair(*torch.ones(2, 3, 4), torch.ones(3, 1)), r"as many probabilities, found \(3, 1\)"),
    ],
)
def test_halves_and_probabilities_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Watched(TorchDispatchMode):
    """The operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_who_watches_sees_an_operator_and_nobody_else_pays_for_it(monkeypatch):
    ids, x = torch.tensor([[1, 0], [2, 1]]), torch.randn(2, 3)

    def run(ids, x):
        index = group_by_destination(ids, 3, rows=4)
        return sum_rows(gather_rows(x, index), index)

    expected = run(ids, x)
    with Watched() as watched:
        assert torch.equal(run(ids, x), expected)
    seen = [name for name in watched.names if name.startswith("d9d::")]
    assert seen == ["d9d::group_by_destination", "d9d::gather_rows", "d9d::sum_rows"]
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(ids), mode.from_tensor(x)
        assert run(*fakes).shape == x.shape
    assert run(*fakes).shape == x.shape  # out of the mode as well
    assert run(ids.to("meta"), x.to("meta")).is_meta
    monkeypatch.setattr("torch._library.custom_ops.CustomOpDef.__call__", None)
    assert torch.equal(run(ids, x), expected)


needs_gpu = pytest.mark.gpu


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [8, 768, 4096, 5000])
def test_activation_on_cuda_is_as_near_to_fp64_as_its_dtype_allows(size, dtype):
    torch.manual_seed(0)
    wide = torch.randn(70, 2 * size + 8, device="cuda").to(dtype)
    gate_up = wide[:, : 2 * size].requires_grad_()  # rows lie apart
    probs = torch.rand(70, device="cuda", requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in (gate_up, probs)]
    wanted = activation_oracle(*exact[0].chunk(2, dim=1), exact[1])
    upstream = torch.randn(size, 70, device="cuda").to(dtype).T
    expected = torch.autograd.grad(wanted, exact, upstream.double())
    for found in (silu_mul(gate_up, probs), silu_mul_pair(*gate_up.chunk(2, dim=1), probs)):
        gradients = torch.autograd.grad(found, (gate_up, probs), upstream)
        # Half an eps is the rounding of the result, and a few eps of fp32 those of the exponential on the way.
        bound = 0.51 * torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
        for a, b in zip((found, gradients[0]), (wanted, expected[0])):
            torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)
        torch.testing.assert_close(gradients[1].double(), expected[1], rtol=1e-4, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_on_cuda_are_those_of_the_cpu(dtype):
    torch.manual_seed(0)
    ids = torch.rand(3000, 130).argsort(1)[:, :8].contiguous()
    ids[::9, :3] = 130
    x, weights = torch.randn(3000, 1000).to(dtype), torch.rand(3000, 8)
    results = []
    for device in ("cpu", "cuda"):
        index = group_by_destination(ids.to(device), 128, rows=int((ids < 128).sum()))
        inputs = [value.detach().to(device).requires_grad_() for value in (x, weights)]
        rows, probs = gather_rows_with_probs(*inputs, index)
        outputs = [rows, probs, sum_rows(rows, index), sum_rows(rows, index, weights_TK=inputs[1])]
        gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(value) * 0.5 for value in outputs])
        results.append([index.row_TK, index.count_D, *outputs, *gradients])
    for on_cpu, on_cuda in zip(*results):
        torch.testing.assert_close(on_cuda.cpu(), on_cpu)
    for on_cpu, on_cuda in zip(*(found[:4] for found in results)):
        assert torch.equal(on_cuda.cpu(), on_cpu)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU that is not the current one")
def test_kernels_run_on_the_gpu_of_their_tensors():
    results = []
    for device in ("cpu", "cuda:1"):
        torch.manual_seed(0)
        ids, x, probs = torch.rand(50, 8).argsort(1)[:, :2].contiguous(), torch.randn(50, 64), torch.rand(50, 2)
        inputs = [value.to(device).requires_grad_() for value in (x, probs)]
        index = group_by_destination(ids.to(device), 8, rows=100)
        ranks = ranks_of_tokens(ids.to(device), 2, 4)
        rows, probs_N = gather_rows_with_probs(*inputs, index)
        out = sum_rows(silu_mul(rows, probs_N), index)
        results.append([*ranks, out, *torch.autograd.grad(out.sum(), inputs)])
    for on_cpu, on_cuda in zip(*results):
        torch.testing.assert_close(on_cuda.cpu(), on_cpu, check_dtype=False)


@needs_gpu
def test_more_than_two_to_the_31_elements_of_rows():
    tokens, slots, size = 40_000, 8, 7168
    assert tokens * slots * size > 2**31
    ids = torch.arange(slots, device="cuda").expand(tokens, slots).contiguous()
    x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    index = group_by_destination(ids, slots, rows=tokens * slots)
    rows = gather_rows(x, index)
    assert torch.equal(rows[-tokens:], x)  # those of the last destination
    total = sum_rows(rows, index)
    assert torch.equal(total, x * slots)
    (gradient,) = torch.autograd.grad(total, x, torch.ones_like(total))
    assert torch.equal(gradient, torch.full_like(x, slots))
    hidden = silu_mul(rows)
    assert torch.equal(hidden[-1], silu_mul(x[-1:])[0])


@needs_gpu
def test_the_same_bits_every_time():
    torch.manual_seed(0)
    ids = torch.rand(5000, 64, device="cuda").argsort(1)[:, :8]
    x = torch.randn(5000, 512, device="cuda", dtype=torch.bfloat16)
    found = []
    for _ in range(20):
        index = group_by_destination(ids, 64, rows=ids.numel())
        found.append((index.row_TK, sum_rows(gather_rows(x, index), index)))
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0]))


def moved_and_weighed(x, probs, gate_up, ids):
    index = group_by_destination(ids, 6, rows=ids.numel())
    rows, probs = gather_rows_with_probs(x, probs, index)
    hidden = silu_mul(rows @ gate_up, probs)
    return sum_rows(hidden, index)


def check_one_graph_for_all_token_counts(device, dtype, size):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moved_and_weighed, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (4, 7, 16, 33, 50):
        torch.manual_seed(tokens)
        ids = torch.rand(tokens, 6, device=device).argsort(1)[:, :2].contiguous()
        x = torch.randn(tokens, size, device=device).to(dtype).requires_grad_()
        probs = torch.rand(tokens, 2, device=device, requires_grad=True)
        gate_up = torch.randn(size, 2 * size, device=device).to(dtype).requires_grad_()
        inputs = x, probs, gate_up
        upstream = torch.randn(tokens, size, device=device).to(dtype)
        found, expected = compiled(*inputs, ids), moved_and_weighed(*inputs, ids)
        assert torch.equal(found, expected)
        for a, b in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (found, expected))):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_one_graph_for_all_token_counts():
    check_one_graph_for_all_token_counts("cpu", torch.float32, 8)


@needs_gpu
def test_one_graph_for_all_token_counts_on_cuda():
    check_one_graph_for_all_token_counts("cuda", torch.bfloat16, 64)
