"""Experts spread over ranks, against the same layer on one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d.mesh.testing import WorldError, run_world
from d9d.moe import (
    AllToAllDispatcher,
    AllToAllDispatcherConfig,
    DispatchNeed,
    GroupedSwiGLU,
    LocalDispatcher,
    LocalDispatcherConfig,
    MoELayer,
    TopKRouter,
    dispatchers,
)

HIDDEN, INTERMEDIATE, EXPERTS = 6, 5, 8


def make_layer(top_k):
    torch.manual_seed(7)
    return MoELayer(TopKRouter(HIDDEN, EXPERTS, top_k), GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE)).double()


def block(tensor):
    """This rank's experts."""
    return tensor.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


def spread(layer):
    for name in ("gate_up_proj", "down_proj"):
        setattr(layer.experts, name, nn.Parameter(block(getattr(layer.experts, name))))
    layer.set_expert_group(dist.group.WORLD)
    assert isinstance(layer.dispatcher, AllToAllDispatcher) == (dist.get_world_size() > 1)


def routings():
    """Name, tokens of each rank, expert ids of a token given all tokens; the last rank's share may be empty."""
    generator = torch.Generator().manual_seed(0)
    ranks = dist.get_world_size()

    def random_ids(tokens, top_k):
        return torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])

    yield "all experts for each token", [3] * ranks, random_ids(3 * ranks, EXPERTS)
    yield "all to one expert", [4] * ranks, torch.full((4 * ranks, 1), EXPERTS - 1)
    yield "all to the experts of one rank", [4] * ranks, torch.tensor([[1, 0]]).expand(4 * ranks, 2)
    yield "one token in all", [0] * (ranks - 1) + [1], random_ids(1, 2)
    yield "a rank without tokens", [5] + [0] * (ranks - 1), random_ids(5, 3)
    yield "no token at all", [0] * ranks, torch.empty(0, 2, dtype=torch.int64)
    for case in range(12):
        share = torch.randint(0, 6, (ranks,), generator=generator).tolist()
        top_k = case % 4 + 1
        ids = random_ids(sum(share), top_k) if sum(share) else torch.empty(0, top_k, dtype=torch.int64)
        yield f"random {case}", share, ids


def run(dispatcher, experts, x, ids, probs, upstream):
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    rows = dispatcher.dispatch(x, ids, probs)
    assert rows.counts_E.dtype == torch.int32
    assert rows.counts_E.sum() == len(rows.x_NH)
    out = dispatcher.combine(experts(rows.x_NH, rows.probs_N, rows.counts_E), rows.handle)
    inputs = x, probs, experts.gate_up_proj, experts.down_proj
    return out, *torch.autograd.grad(out, inputs, upstream)  # an input without gradient raises here


def check_dispatchers_agree():
    whole, spread_out = make_layer(2).experts, make_layer(2)
    spread(spread_out)
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    for name, share, ids in routings():
        tokens = len(ids)
        torch.manual_seed(1)
        x, probs = torch.randn(tokens, HIDDEN, dtype=torch.float64), torch.rand(ids.shape, dtype=torch.float64)
        upstream = torch.randn_like(x)
        expected = run(LocalDispatcher(EXPERTS), whole, x, ids, probs, upstream)
        mine = torch.arange(tokens).split(share)[dist.get_rank()]
        found = run(dispatcher, spread_out.experts, x[mine], ids[mine], probs[mine], upstream[mine])
        expected = *(t[mine] for t in expected[:3]), *(block(t) for t in expected[3:])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def check_layers_agree():
    whole, layer = make_layer(3), make_layer(3)
    spread(layer)
    torch.manual_seed(2)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(2 * ranks, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    mine = slice(2 * rank, 2 * rank + 2)
    for _ in range(2):  # gradients accumulate
        out = layer(x[mine])
        expected = whole(x)
        torch.testing.assert_close(out, expected[mine], rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        expected.square().sum().backward()
    for (name, ours), theirs in zip(layer.named_parameters(), whole.parameters()):
        gradient = ours.grad
        if name.startswith("router"):
            dist.all_reduce(gradient)
            torch.testing.assert_close(gradient, theirs.grad, rtol=1e-12, atol=1e-12)
        else:
            torch.testing.assert_close(gradient, block(theirs.grad), rtol=1e-12, atol=1e-12)
    load = layer.expert_load.clone()
    dist.all_reduce(load)
    assert torch.equal(load, whole.expert_load)


def check_calls_interleave():
    """Two dispatches before the first combine, and backward in another order."""
    layer = make_layer(2)
    spread(layer)
    torch.manual_seed(3 + dist.get_rank())
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in (3, 5)]
    alone = [layer(x) for x in xs]
    routings = [layer.router(x) for x in xs]
    rows = [layer.dispatcher.dispatch(x, r.ids_TK, r.probs_TK) for x, r in zip(xs, routings)]
    ys = [layer.experts(r.x_NH, r.probs_N, r.counts_E) for r in rows]
    for i in (1, 0):
        out = layer.dispatcher.combine(ys[i], rows[i].handle)
        assert torch.equal(out, alone[i])
        out.sum().backward()


def check_bf16_rounds_once_per_rank():
    ids = torch.tensor([[0, EXPERTS // 2, EXPERTS - 1, 1]]).expand(5, 4)
    torch.manual_seed(4)
    x, probs = torch.randn(5, HIDDEN).bfloat16(), torch.rand(5, 4)
    rows = AllToAllDispatcher(EXPERTS, dist.group.WORLD).dispatch(x, ids, probs)
    assert rows.probs_N.dtype == torch.float32
    out = AllToAllDispatcher(EXPERTS, dist.group.WORLD).combine(rows.x_NH, rows.handle)
    torch.testing.assert_close(out.double(), 4 * x.double(), rtol=dist.get_world_size() * 2**-8, atol=0)


def check_a_copy_works_on_the_same_group():
    layer = make_layer(2)
    spread(layer)
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def check_parameters_of_all_experts_are_refused():
    """Who forgets to keep this rank's block gets no wrong numbers."""
    layer = make_layer(2)
    layer.set_expert_group(dist.group.WORLD)
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="parameters must be this rank's block"):
            layer(torch.randn(3, HIDDEN, dtype=torch.float64))


def gradients_of(layer, x, run):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    run(layer, x)
    return x.grad, *(parameter.grad for parameter in layer.parameters())


def plainly(layer, x):
    layer(x).square().sum().backward()


def recomputed(layer, x):
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()


def recomputed_reentrantly(layer, x):
    checkpoint(layer, x, use_reentrant=True).square().sum().backward()


def in_two_parts(layer, x):
    """Inputs first; then, on each rank at its own time, the weights: they need no other rank."""
    from d9d.parallel.pipeline import backward_inputs  # noqa: PLC0415 - not in every rank of a world

    [x.grad], weights = backward_inputs([layer(x).square().sum()], [None], [x])
    assert all(parameter.grad is None for parameter in layer.parameters())
    weights.run()


def check_recompute_and_split_backward():
    layer = make_layer(2)
    spread(layer)
    torch.manual_seed(6)
    x = torch.randn(3 if dist.get_rank() else 0, HIDDEN, dtype=torch.float64)
    expected = gradients_of(layer, x, plainly)
    for run in (recomputed, recomputed_reentrantly, in_two_parts):
        torch.testing.assert_close(gradients_of(layer, x, run), expected, rtol=1e-12, atol=1e-12)


def check_one_rank_needs_no_gradient_of_its_tokens():
    for frozen in ((), ("router",), ("router", "experts")):
        layer = make_layer(2)
        spread(layer)
        for name in frozen:
            getattr(layer, name).requires_grad_(requires_grad=False)
        x = torch.randn(3, HIDDEN, dtype=torch.float64)
        gradient, *expected = gradients_of(layer, x, plainly)
        for run in (plainly, recomputed):
            layer.zero_grad()
            mine = x.clone().requires_grad_(dist.get_rank() == 0)
            run(layer, mine)
            torch.testing.assert_close(mine.grad, gradient if mine.requires_grad else None, rtol=1e-12, atol=1e-12)
            for parameter, wanted in zip(layer.parameters(), expected):
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-12)


def check_no_rank_needs_a_gradient():
    """Then none is recorded, as below the first layer that is trained."""
    layer = make_layer(2)
    spread(layer)
    assert not layer.requires_grad_(requires_grad=False)(torch.randn(3, HIDDEN, dtype=torch.float64)).requires_grad


def all_checks():
    check_parameters_of_all_experts_are_refused()
    check_recompute_and_split_backward()
    check_one_rank_needs_no_gradient_of_its_tokens()
    check_no_rank_needs_a_gradient()
    check_a_copy_works_on_the_same_group()
    check_dispatchers_agree()
    check_layers_agree()
    check_calls_interleave()
    check_bf16_rounds_once_per_rank()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_expert_parallel_equals_one_process(ranks):
    run_world(ranks, all_checks, timeout=60)


def test_a_rank_that_records_no_gradient_says_so():
    with pytest.raises(WorldError, match="tokens of other ranks need a gradient and this rank records none"):
        run_world(2, layer_where_one_rank_records_no_gradient, timeout=60)


def check_compiled():
    layer = make_layer(2)
    spread(layer)
    x = torch.randn(3 * dist.get_rank(), HIDDEN, dtype=torch.float64)
    expected = gradients_of(layer, x, plainly)
    compiled = torch.compile(layer, backend="aot_eager")
    found = gradients_of(layer, x, lambda _, x: plainly(compiled, x))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_a_compiled_layer_equals_eager_where_experts_are_spread():
    run_world(2, check_compiled)


def layer_where_one_rank_records_no_gradient():
    layer = make_layer(2)
    spread(layer)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        layer(torch.randn(3, HIDDEN, dtype=torch.float64))


def spread_too_far():
    layer = MoELayer(TopKRouter(HIDDEN, 3, 1), GroupedSwiGLU(3, HIDDEN, INTERMEDIATE))
    layer.set_expert_group(dist.group.WORLD)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(WorldError, match="3 experts do not divide over 4 expert-parallel ranks"):
        run_world(4, spread_too_far)


def test_dispatcher_is_chosen_by_configuration_then_environment_then_ranks(monkeypatch):
    assert dispatchers.choose(None, DispatchNeed(ranks=1)).config == LocalDispatcherConfig()
    choice = dispatchers.choose(None, DispatchNeed(ranks=2))
    assert choice.config == AllToAllDispatcherConfig()
    assert "'local' does not reach experts of other ranks" in choice.reason
    with pytest.raises(ValueError, match="spread over 2; use 'all_to_all'"):
        dispatchers.choose("local", DispatchNeed(ranks=2))
    monkeypatch.setenv("D9D_DISPATCHER", "all_to_all")
    assert dispatchers.choose(None, DispatchNeed(ranks=1)).config == AllToAllDispatcherConfig()
    assert dispatchers.choose("local", DispatchNeed(ranks=1)).config == LocalDispatcherConfig()
    monkeypatch.setenv("D9D_DISPATCHER", "all-to-all")
    with pytest.raises(ValueError, match="did you mean 'all_to_all'"):
        dispatchers.choose(None, DispatchNeed(ranks=1))
