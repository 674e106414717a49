"""Scores, selection, the bias that selects, loads, replay, and compilation of the router."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d.mesh.testing import run_world
from d9d.moe import (
    BalanceLoss,
    ClampedSwiGLU,
    ForcedBalance,
    GroupedSwiGLU,
    GroupLimited,
    MoELayer,
    PlainGatedActivation,
    SelectedSoftmaxScoring,
    Sequences,
    SigmoidScoring,
    SoftmaxScoring,
    TopKRouter,
    ZLoss,
    record_routing,
    replay_routing,
    sum_expert_loads,
    update_expert_bias,
)

torch.set_num_threads(1)
HIDDEN, EXPERTS = 6, 8


def make_router(top_k=2, **options):
    torch.manual_seed(0)
    return TopKRouter(HIDDEN, EXPERTS, top_k, **options).double()


def tokens(*shape, seed=1):
    torch.manual_seed(seed)
    return torch.randn(*shape, HIDDEN, dtype=torch.float64)


@pytest.mark.parametrize("scoring", [SoftmaxScoring(), SoftmaxScoring(renormalize=False), SigmoidScoring()])
def test_the_bias_selects_and_does_not_weigh(scoring):
    plain, biased = make_router(scoring=scoring), make_router(scoring=scoring, expert_bias=True)
    x = tokens(20)
    assert torch.equal(plain(x).probs_TK, biased(x).probs_TK)  # the bias starts as zero
    biased.expert_bias[5] = 10.0
    routing = biased(x)
    assert (routing.ids_TK == 5).any(1).all()
    scores = scoring.scores(x @ plain.weight.t()).gather(1, routing.ids_TK)
    renormalized = scores / scores.sum(1, keepdim=True) if scoring.renormalize else scores
    torch.testing.assert_close(routing.probs_TK, renormalized, rtol=1e-12, atol=1e-12)


def test_selected_softmax_is_softmax_renormalized():
    x = tokens(20)
    a, b = make_router(scoring=SelectedSoftmaxScoring()), make_router()
    assert torch.equal(a(x).ids_TK, b(x).ids_TK)
    torch.testing.assert_close(a(x).probs_TK, b(x).probs_TK, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scoring", [SoftmaxScoring(), SigmoidScoring(), SelectedSoftmaxScoring()])
def test_experts_whose_scores_underflow_have_finite_weights_and_gradients(scoring):
    router = TopKRouter(HIDDEN, EXPERTS, 2, scoring=scoring)
    x = torch.randn(3, HIDDEN, requires_grad=True)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:6] = -300 * x[0] / x[0].square().sum()
        router.weight[6] = 300 * x[0] / x[0].square().sum()
    routing = router(x, ids_TK=torch.tensor([[0, 1], [2, 3], [6, 0]]))
    underflown = not isinstance(scoring, SelectedSoftmaxScoring)
    torch.testing.assert_close(routing.probs_TK[0], torch.full((2,), 0.0 if underflown else 0.5))
    routing.probs_TK.sum().backward()
    assert routing.probs_TK.isfinite().all()
    assert x.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), groups=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_group_limited_selection_takes_the_best_of_the_best_groups(data, groups, seed):
    size = EXPERTS // groups
    top_groups, judged_by = data.draw(st.integers(1, groups)), data.draw(st.integers(1, size))
    top_k = data.draw(st.integers(1, top_groups * size))
    selection = GroupLimited(groups=groups, top_groups=top_groups, judged_by=judged_by)
    selection.check(EXPERTS, top_k)
    scores = torch.rand(5, EXPERTS, generator=torch.Generator().manual_seed(seed))
    for row, ids in zip(scores.tolist(), selection(scores, top_k).tolist()):
        judged = [sum(sorted(row[g * size : (g + 1) * size], reverse=True)[:judged_by]) for g in range(groups)]
        open_groups = sorted(range(groups), key=lambda g: -judged[g])[:top_groups]
        candidates = [e for e in range(EXPERTS) if e // size in open_groups]
        assert ids == sorted(candidates, key=lambda e: -row[e])[:top_k]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"groups": 3, "top_groups": 1}, "groups must divide num_experts = 8, found 3"),
        ({"groups": 4, "top_groups": 5}, "top_groups must be within 1 and groups = 4, found 5"),
        ({"groups": 4, "top_groups": 2, "judged_by": 3}, "judged_by must be within 1 and the 2 experts"),
        ({"groups": 4, "top_groups": 1}, "1 groups of 2 experts have no top_k = 3; open more"),
    ],
)
def test_groups_that_cannot_be_are_refused_when_built(settings_, message):
    with pytest.raises(ValueError, match=message):
        make_router(3, selection=GroupLimited(**settings_))


@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
def test_forced_balance_gives_every_expert_the_same_load(top_k):
    router = make_router(top_k, selection=ForcedBalance())
    routing = router(tokens(16))
    assert router.expert_load.tolist() == [2 * top_k] * EXPERTS
    assert all(len(set(row)) == top_k for row in routing.ids_TK.tolist())


def test_scores_are_fp32_where_tokens_are_bf16_and_logits_too_if_asked():
    x = tokens(50).bfloat16()
    rounded, exact = make_router().bfloat16(), make_router(logits_in_fp32=True).bfloat16()
    expected = (x.double() @ exact.weight.double().t()).softmax(-1).topk(2).values
    expected = expected / expected.sum(-1, keepdim=True)
    found = exact(x).probs_TK
    assert found.dtype == rounded(x).probs_TK.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert (rounded(x).probs_TK.double() - expected).abs().max() > 1e-4


def test_a_mask_of_other_tokens_is_refused():
    with pytest.raises(ValueError, match=r"the shape \(2, 4\) of the tokens, found \(4,\)"):
        make_router()(tokens(2, 4), mask=torch.ones(4, dtype=torch.bool))


# The bias and its update


def test_the_bias_stays_fp32_through_casts_and_is_saved():
    router = TopKRouter(HIDDEN, EXPERTS, 2, expert_bias=True)
    router.expert_bias.fill_(1.001)
    kept = router.expert_bias.clone()
    assert router.bfloat16().expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, kept)
    assert router.weight.dtype == torch.bfloat16
    assert router.double().expert_bias.dtype == torch.float64
    assert router.half().expert_bias.dtype == torch.float32
    assert "expert_bias" in router.state_dict()
    assert "expert_bias" not in TopKRouter(HIDDEN, EXPERTS, 2).state_dict()
    with torch.device("meta"):
        empty = TopKRouter(HIDDEN, EXPERTS, 2, expert_bias=True).bfloat16()
    assert empty.expert_bias.dtype == torch.float32
    empty.to_empty(device="cpu").reset_parameters()
    assert (empty.expert_bias == 0).all()


def test_an_update_moves_biases_against_the_load_and_zeroes_it():
    router, unbiased = make_router(expert_bias=True), make_router()
    for r in (router, unbiased):
        r.expert_load.copy_(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]))  # 3.5 on average
    update_expert_bias([nn.Sequential(router, unbiased), router], None, rate=0.25)
    assert router.expert_bias.tolist() == [0.25] * 4 + [-0.25] * 4
    assert (router.expert_load == 0).all()
    assert unbiased.expert_load.sum() == 28
    router.expert_load.fill_(3)
    update_expert_bias([router], None)
    assert router.expert_bias.tolist() == [0.25] * 4 + [-0.25] * 4  # all are at the mean


def test_updates_balance_a_router():
    router = make_router(expert_bias=True, scoring=SigmoidScoring())
    with torch.no_grad():
        router.weight[:, 0] += torch.linspace(-1, 1, EXPERTS)
    x = tokens(256).abs()
    router(x)
    before = router.expert_load.max()
    for _ in range(200):
        update_expert_bias([router], None, rate=5e-3)
        router(x)
    assert before > 150
    assert router.expert_load.max() <= 80  # 64 is even


def check_loads_over_ranks():
    rank = dist.get_rank()
    model = nn.ModuleDict({"a": make_router(expert_bias=True), "b": make_router(), "c": nn.Linear(2, 2)})
    everyone = nn.ModuleDict({"a": make_router(expert_bias=True), "b": make_router()})
    for r in range(dist.get_world_size()):
        x = tokens(3 * r, seed=r)
        for name in ("a", "b"):
            everyone[name](x)
            if r == rank:
                model[name](x)
    mine = model["a"].expert_load.clone()
    loads = sum_expert_loads(model, dist.group.WORLD)
    assert loads.keys() == {"a", "b"}
    assert all(torch.equal(loads[name], everyone[name].expert_load) for name in loads)
    assert torch.equal(model["a"].expert_load, mine)
    update_expert_bias(model.values(), dist.group.WORLD)
    update_expert_bias(everyone.values(), None)
    assert torch.equal(model["a"].expert_bias, everyone["a"].expert_bias)
    assert model["a"].expert_bias.any()
    assert sum_expert_loads(nn.Linear(2, 2), dist.group.WORLD) == {}


def test_loads_and_biases_are_those_of_all_ranks():
    run_world(4, check_loads_over_ranks)


# Replay


def make_model():
    torch.manual_seed(2)
    layers = [MoELayer(TopKRouter(HIDDEN, EXPERTS, 2), GroupedSwiGLU(EXPERTS, HIDDEN, 5)) for _ in range(2)]
    return nn.Sequential(*layers).double()


def test_recorded_routing_is_taken_again():
    model, x = make_model(), [tokens(2, 4, seed=s) for s in (3, 4)]
    with record_routing(model) as record:
        for part in x:
            model(part)
    assert [len(ids) for ids in record.values()] == [2, 2]
    before = {name: load.clone() for name, load in sum_expert_loads(model, None).items()}
    with torch.no_grad():
        for layer in model:
            layer.router.weight.copy_(layer.router.weight.roll(1, 0))
    expected = model[0](x[0], ids_TK=record["0.router"][0])
    with record_routing(model) as free:
        model(x[0])
    assert not torch.equal(free["0.router"][0], record["0.router"][0])
    with replay_routing(model, record):
        out = [model(part) for part in x]
    assert torch.equal(model[1](expected, ids_TK=record["1.router"][0]), out[0])
    out[1].sum().backward()
    assert all(layer.router.weight.grad.any() for layer in model)
    assert all(layer.router.tape is None for layer in model)
    assert before.keys() == record.keys()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_replays_what_its_forward_took(use_reentrant):
    model, x = make_model(), tokens(2, 4).requires_grad_()
    record = {f"{i}.router": [torch.arange(16).view(8, 2) % EXPERTS] for i in range(2)}
    with replay_routing(model, record):
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    recomputed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with replay_routing(model, record):
        model(x).sum().backward()
    for found, parameter in zip(recomputed, model.parameters()):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)


def test_replay_says_what_it_cannot_do():
    model, x = make_model(), tokens(2, 4).requires_grad_()
    with record_routing(model) as record:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [len(ids) for ids in record.values()] == [1, 1]  # the recompute is not recorded
    with (
        pytest.raises(ValueError, match=r"no routing is recorded for \['1.router'\]"),
        replay_routing(model, {"0.router": []}),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"\(12, 2\) tokens and choices are needed, found \(8, 2\)"),
        replay_routing(model, record),
    ):
        model(tokens(3, 4))
    with replay_routing(model, record):
        model(x)
        with pytest.raises(RuntimeError, match="'0.router' runs more often than the 1 times"):
            model(x)
    twice = {name: ids * 2 for name, ids in record.items()}
    with replay_routing(model, twice):
        out = [checkpoint(model, x, use_reentrant=False) for _ in range(2)]
        with pytest.raises(RuntimeError, match="one of 2 forwards of one replay_routing"):
            out[0].sum().backward()


# Compilation


def compiled_router():
    router = make_router(
        3,
        scoring=SigmoidScoring(),
        selection=GroupLimited(groups=4, top_groups=2),
        expert_bias=True,
        bias=True,
        losses=[BalanceLoss(coefficient=0.5), ZLoss(coefficient=0.5)],
    )
    router.expert_bias.normal_(std=0.1)
    return router


@pytest.mark.parametrize("options", ["plain", "mask", "documents"])
def test_the_router_is_one_graph_for_all_numbers_of_tokens_and_equals_eager(options):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = compiled_router(), compiled_router()
    run = torch.compile(compiled, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 4, 9, 16, 21):
        x = tokens(2, length, seed=length).requires_grad_()
        given = {}
        if options != "plain":
            given["mask"] = torch.rand(2, length) > 0.3
        if options == "documents":
            given["sequences"] = Sequences(3, torch.arange(2 * length) % 3)
        outputs = []
        for call in (eager, run):
            routing = call(x, **given)
            routing.probs_TK.square().sum().backward()
            outputs += [(routing.ids_TK, routing.probs_TK, x.grad)]
            x.grad = None
        for a, b in zip(*outputs):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(eager.expert_load, compiled.expert_load)
    for a, b in zip(eager.parameters(), compiled.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_a_plain_activation_is_one_graph_for_all_numbers_of_rows_and_equals_eager():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    activation = PlainGatedActivation(ClampedSwiGLU(limit=0.5), interleaved=True)
    run = torch.compile(activation, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 4, 9, 16, 21):
        torch.manual_seed(rows)
        gate_up = torch.randn(rows, 12, dtype=torch.float64, requires_grad=True)
        probs = torch.rand(rows, dtype=torch.float64, requires_grad=True)
        found = [
            torch.autograd.grad(call(gate_up, probs).square().sum(), (gate_up, probs)) for call in (activation, run)
        ]
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_router_counts_once_under_recompute():
    torch._dynamo.reset()
    router = compiled_router()
    run = torch.compile(router, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = tokens(2, 4).requires_grad_()
        checkpoint(run, x, use_reentrant=False).probs_TK.sum().backward()
    assert router.expert_load.sum() == 2 * 8 * 3


def test_autocast_leaves_logits_in_fp32_and_what_is_made_of_them():
    torch.manual_seed(0)
    router = TopKRouter(HIDDEN, EXPERTS, 2, bias=True, logits_in_fp32=True)
    x = torch.randn(50, HIDDEN)
    expected = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert torch.equal(found.ids_TK, expected.ids_TK)
    assert torch.equal(found.probs_TK, expected.probs_TK)


def test_the_bias_that_selects_is_fp32_where_the_default_dtype_is_bf16():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = TopKRouter(HIDDEN, EXPERTS, 2, expert_bias=True)
    finally:
        torch.set_default_dtype(before)
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias.dtype == torch.float32


def test_the_load_starts_at_zero_when_a_checkpoint_is_loaded_into_what_was_on_meta(monkeypatch):
    saved = TopKRouter(HIDDEN, EXPERTS, 2).state_dict()
    with torch.device("meta"):
        router = TopKRouter(HIDDEN, EXPERTS, 2)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(7))
    router.to_empty(device="cpu").load_state_dict(saved)
    assert router.expert_load.tolist() == [0] * EXPERTS


def test_the_ids_of_a_routing_may_be_given_with_their_padding():
    router = make_router()
    x, mask = torch.randn(5, HIDDEN, dtype=torch.float64), torch.tensor([True, False, True, True, False])
    expected = router(x, mask=mask)
    assert (expected.ids_TK[~mask] == EXPERTS).all()
    found = router(x, mask=mask, ids_TK=expected.ids_TK)
    assert all(map(torch.equal, found, expected))


def test_ids_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match=r"must be torch.int64, found torch.int32; convert them by .long\(\)"):
        make_router()(torch.randn(1, HIDDEN, dtype=torch.float64), ids_TK=torch.tensor([[0, 1]], dtype=torch.int32))


def test_a_bias_that_was_loaded_in_bf16_is_not_moved():
    router = TopKRouter(HIDDEN, EXPERTS, 2, expert_bias=True)
    router.load_state_dict({name: value.bfloat16() for name, value in router.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"must be fp32 or wider, found torch.bfloat16; load it without assign=True"):
        update_expert_bias([router], None)
