"""Grouped matrix products, their choice, and (gpu) the whole layer on CUDA."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.moe import (
    EagerGroupedMMConfig,
    GroupedMMNeed,
    GroupedSwiGLU,
    MoELayer,
    TopKRouter,
    TorchGroupedMMConfig,
    grouped_mm_backends,
)

EAGER, TORCH = EagerGroupedMMConfig().build(), TorchGroupedMMConfig().build()
CUDA_BF16 = GroupedMMNeed(device_type="cuda", dtype=torch.bfloat16, sizes=(16, 8))


def reference(x, weight, counts):
    expert = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts)
    return torch.einsum("nk,nmk->nm", x, weight[expert])


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [5, 0, 0], [0, 0, 1]])
@pytest.mark.parametrize(
    ("backend", "dtype", "blackwell"),
    [(EAGER, torch.float64, False), (TORCH, torch.float32, False), (TORCH, torch.float32, True)],
)
def test_products_are_right_with_empty_groups(monkeypatch, backend, dtype, blackwell, counts):
    monkeypatch.setattr("d9d.moe._grouped_mm._spoils_empty_groups", lambda device: blackwell)
    counts = torch.tensor(counts, dtype=torch.int32)
    x = torch.randn(int(counts.sum()), 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 4, 8, dtype=dtype, requires_grad=True)
    found, expected = backend(x, weight, counts), reference(x, weight, counts)
    torch.testing.assert_close(found, expected)
    upstream = torch.ones(()).to(dtype).expand(found.shape)  # not contiguous
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), upstream) for y in (found, expected))):
        torch.testing.assert_close(a, b)


def test_choice_goes_by_configuration_then_environment_then_device(monkeypatch):
    assert grouped_mm_backends.choose(None, CUDA_BF16).config == TorchGroupedMMConfig()
    cpu = GroupedMMNeed(device_type="cpu", dtype=torch.bfloat16)
    choice = grouped_mm_backends.choose(None, cpu)
    assert choice.config == EagerGroupedMMConfig()
    assert "'torch' runs on ['cuda'] only" in choice.reason
    with pytest.raises(ValueError, match="'torch', asked for in the configuration, runs on"):
        grouped_mm_backends.choose("torch", cpu)
    monkeypatch.setenv("D9D_GROUPED_MM_BACKEND", '{"kind": "eager"}')
    assert grouped_mm_backends.choose(None, CUDA_BF16).config == EagerGroupedMMConfig()
    assert grouped_mm_backends.choose("torch", CUDA_BF16).config == TorchGroupedMMConfig()
    monkeypatch.setenv("D9D_GROUPED_MM_BACKEND", "tensor")
    with pytest.raises(ValueError, match=r"unknown grouped_mm backend 'tensor', known are \['eager', 'torch'\]"):
        GroupedSwiGLU(2, 4, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "takes .* only, not torch.float64"),
        ({"sizes": (16, 12)}, "needs rows of a multiple of 16 bytes, not of 12 × torch.bfloat16"),
    ],
)
def test_what_torch_cannot_do_is_refused_and_left_to_eager(change, message):
    need = GroupedMMNeed(**{"device_type": "cuda", "dtype": torch.bfloat16, "sizes": (16, 8), **change})
    assert grouped_mm_backends.choose(None, need).config == EagerGroupedMMConfig()
    with pytest.raises(ValueError, match=message):
        grouped_mm_backends.choose("torch", need)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "counts", [[13, 0, 7, 1, 0, 64, 3, 5], [0] * 7 + [1], [0] * 8, [129] * 8, [0, 1000, 0, 0, 0, 0, 0, 0]]
)
def test_bf16_product_on_cuda_with_any_group_sizes(counts):
    counts = torch.tensor(counts, dtype=torch.int32, device="cuda")
    rows = int(counts.sum())
    x = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(64, rows, device="cuda", dtype=torch.bfloat16).t()  # not contiguous
    found = TORCH(x, weight, counts)
    found = found, *torch.autograd.grad(found, (x, weight), upstream)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = reference(x64, weight64, counts)
    expected = expected, *torch.autograd.grad(expected, (x64, weight64), upstream.double())
    for a, b in zip(found, expected):
        torch.testing.assert_close(
            a.double(), b, rtol=1e-2, atol=1e-2 * max(1.0, float(b.abs().max()) if rows else 1.0)
        )
    assert (found[2][counts == 0] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 333])
def test_layer_on_cuda_never_waits_for_the_device_and_is_right(tokens):
    torch.manual_seed(0)
    layer = MoELayer(TopKRouter(128, 16, 4), GroupedSwiGLU(16, 128, 64)).cuda().bfloat16()
    x = torch.randn(1, tokens, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)
    layer(x).backward(upstream)  # library handles are made in the first call
    layer.zero_grad()
    x.grad = None
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = layer(x)
        out.backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    exact = MoELayer(TopKRouter(128, 16, 4), GroupedSwiGLU(16, 128, 64)).cuda().double()
    exact.load_state_dict(layer.state_dict())
    routing = layer.router(x.detach().flatten(0, 1))  # bf16 scores may choose otherwise; compare the same choice
    x64 = x.detach().double().requires_grad_()
    rows = exact.dispatcher.dispatch(x64.flatten(0, 1), routing.ids_TK, routing.probs_TK.double())
    expected = exact.dispatcher.combine(exact.experts(rows.x_NH, rows.probs_N, rows.counts_E), rows.handle)
    expected.backward(upstream.double().flatten(0, 1))
    pairs = [(out.flatten(0, 1), expected)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.expert_parameters(), exact.expert_parameters())]
    for a, b in pairs:
        assert a.isfinite().all()
        assert (a.double() - b).norm() <= 1e-2 * b.norm()
    assert int(layer.expert_load.sum()) == 3 * tokens * 4


class Counted(TorchDispatchMode):
    """How often a product was computed."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func in {torch.ops.aten._grouped_mm.default, torch.ops.aten.mm.default}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("backend", "each"), [(TORCH, 1), (EAGER, 2)])  # the loop has one product for each expert
def test_a_pass_for_one_gradient_computes_no_other(backend, each):
    counts = torch.tensor([3, 2], dtype=torch.int32)
    x = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(2, 4, 8, requires_grad=True)
    y = backend(x, weight, counts)
    upstream = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (x, weight), upstream, retain_graph=True)
    for place, tensor in enumerate((x, weight)):
        with Counted() as counted:
            (found,) = torch.autograd.grad(y, tensor, upstream, retain_graph=True)
        assert torch.equal(found, wanted[place])
        assert counted.products == each
    with Counted() as counted:
        torch.autograd.grad(y, (x, weight), upstream)
    assert counted.products == 2 * each
