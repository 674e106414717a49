"""Every flavour of the layer on CUDA: nothing waits for the device, and results are those of CPU in fp64."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from d9d.moe import (
    BalanceLoss,
    ClampedSwiGLU,
    GroupedSwiGLU,
    GroupLimited,
    MoELayer,
    PlainGatedActivation,
    SelectedSoftmaxScoring,
    Sequences,
    SigmoidScoring,
    SoftmaxScoring,
    SwiGLU,
    TopKRouter,
    ZLoss,
    record_routing,
    update_expert_bias,
)

pytestmark = pytest.mark.gpu
HIDDEN, INTERMEDIATE, EXPERTS = 128, 64, 16
LOSSES = [BalanceLoss(coefficient=0.01), ZLoss(coefficient=0.001)]


def qwen3():
    return MoELayer(TopKRouter(HIDDEN, EXPERTS, 4), GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE))


def qwen2():
    router = TopKRouter(HIDDEN, EXPERTS, 4, scoring=SoftmaxScoring(renormalize=False), losses=LOSSES)
    experts = GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE, fused=False)
    return MoELayer(router, experts, shared=SwiGLU(HIDDEN, 64, fused=True), shared_gate=True)


def deepseek():
    router = TopKRouter(
        HIDDEN,
        EXPERTS,
        4,
        scoring=SigmoidScoring(),
        selection=GroupLimited(groups=4, top_groups=2),
        scale=2.5,
        expert_bias=True,
        losses=LOSSES,
        logits_in_fp32=True,
    )
    return MoELayer(router, GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE), shared=SwiGLU(HIDDEN, 64))


def gpt_oss(*, fused=True):
    router = TopKRouter(HIDDEN, EXPERTS, 4, scoring=SelectedSoftmaxScoring(), bias=True, losses=LOSSES)
    activation = PlainGatedActivation(ClampedSwiGLU(), interleaved=True)
    experts = GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE, activation=activation, bias=True, fused=fused)
    return MoELayer(router, experts)


def gpt_oss_apart():
    return gpt_oss(fused=False)


def step(layer, x, upstream, *, form, **given):
    with torch.autocast("cuda", torch.bfloat16, enabled=form == "autocast"):
        out = checkpoint(layer, x, use_reentrant=False, **given) if form == "recomputed" else layer(x, **given)
    out.backward(upstream)
    update_expert_bias([layer], None)
    return out


@pytest.mark.parametrize("flavour", [qwen3, qwen2, deepseek, gpt_oss, gpt_oss_apart])
@pytest.mark.parametrize(
    "form", ["plain", "recomputed", "autocast", "padded", "documents", "one token", "all padding", "nothing"]
)
def test_no_flavour_waits_for_the_device_and_all_are_right(flavour, form):
    torch.manual_seed(0)
    dtype = torch.float32 if form == "autocast" else torch.bfloat16
    layer = flavour().cuda().to(dtype)
    exact = copy.deepcopy(layer).cpu().double()
    length = {"one token": 1, "nothing": 0}.get(form, 77)
    x = torch.randn(2, length, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x, dtype=torch.bfloat16)
    given = {}
    if form in {"padded", "all padding"}:
        given["mask"] = torch.rand(2, length, device="cuda") > (0.4 if form == "padded" else 1.0)
    if form == "documents":
        offsets = torch.tensor([0, 3, 3, 100, 2 * length], device="cuda", dtype=torch.int32)
        given["sequences"] = Sequences.from_offsets(offsets, 2 * length)
    step(layer, x, upstream, form=form, **given)  # libraries are set up in the first call
    layer.zero_grad()
    x.grad = None
    layer.router.expert_load.zero_()
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.zero_()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with record_routing(layer) as record:
            out = step(layer, x, upstream, form=form, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    on_cpu = {name: value.cpu() for name, value in given.items() if name == "mask"}
    if form == "documents":
        on_cpu["sequences"] = Sequences.from_offsets(offsets.cpu(), 2 * length)
    x_exact = x.detach().cpu().double().requires_grad_()
    [ids] = record["router"]  # bf16 scores may choose otherwise; compare the same choice
    expected = exact(x_exact, ids_TK=ids.cpu(), **on_cpu)
    expected.backward(upstream.cpu().double())
    assert out.dtype == torch.bfloat16
    pairs = {"out": (out, expected), "input": (x.grad, x_exact.grad)}
    for (name, ours), theirs in zip(layer.named_parameters(), exact.parameters()):
        pairs[name] = ours.grad, theirs.grad
    for name, (ours, theirs) in pairs.items():
        assert ours.isfinite().all(), name
        assert (ours.cpu().double() - theirs).norm() <= 3e-2 * theirs.norm() + 1e-6, name
    counted = exact.router.expert_load
    if layer.router.expert_bias is None:
        assert torch.equal(layer.router.expert_load.cpu(), counted)
    else:  # the update has used the load
        moved = (counted.sum() - counted * EXPERTS).sign() * 1e-3
        torch.testing.assert_close(layer.router.expert_bias.cpu(), moved.float())
        assert not layer.router.expert_load.any()


def test_results_are_the_same_bits_every_time():
    torch.manual_seed(0)
    layer = gpt_oss().cuda().bfloat16()
    x = torch.randn(2, 333, HIDDEN, device="cuda", dtype=torch.bfloat16)
    found = []
    for _ in range(3):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        out = layer(given)
        out.square().sum().backward()
        found.append([out, given.grad, *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(found[0], later))


def test_the_compiled_router_on_cuda_equals_eager():
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = deepseek().router.cuda()
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, dynamic=True)
    x = torch.randn(2, 37, HIDDEN, device="cuda", requires_grad=True)
    outputs = []
    for call in (eager, run):
        routing = call(x)
        routing.probs_TK.square().sum().backward()
        outputs.append((routing.ids_TK, routing.probs_TK, x.grad))
        x.grad = None
    for a, b in zip(*outputs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(eager.expert_load, compiled.expert_load)
