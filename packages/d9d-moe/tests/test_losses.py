"""Auxiliary losses: what they are, their gradients, and that they depend on no layout."""

from itertools import pairwise

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
    GroupedSwiGLU,
    MoELayer,
    RoutedTokens,
    SelectedSoftmaxScoring,
    Sequences,
    SigmoidScoring,
    SoftmaxScoring,
    SwiGLU,
    TopKRouter,
    ZLoss,
    attach_auxiliary,
)

torch.set_num_threads(1)
HIDDEN, EXPERTS, TOP_K = 6, 8, 2
SCORINGS = [SoftmaxScoring(), SigmoidScoring(), SelectedSoftmaxScoring()]


def routed(tokens, scoring, *, sequences, mask=None, seed=0):
    torch.manual_seed(seed)
    logits = torch.randn(tokens, EXPERTS, dtype=torch.float64, requires_grad=True)
    return RoutedTokens(logits, logits.detach().topk(TOP_K).indices, scoring, sequences, mask)


def balance_by_loop(tokens, scoring):
    """Sequence by sequence, token by token."""
    total = 0.0
    for d in range(tokens.sequences.number):
        ids_T = tokens.sequences.ids_T
        rows = [
            t
            for t in range(len(tokens.logits_TE))
            if (tokens.mask_T is None or tokens.mask_T[t])
            and (t // (len(tokens.logits_TE) // tokens.sequences.number) if ids_T is None else ids_T[t]) == d
        ]
        for e in range(EXPERTS):
            f, p = 0.0, 0.0
            for t in rows:
                f += EXPERTS / (TOP_K * len(rows)) * (e in tokens.ids_TK[t].tolist())
                logits = tokens.logits_TE[t]
                scores = logits.sigmoid() if isinstance(scoring, SigmoidScoring) else logits.exp()
                p += scores[e] / scores.sum() / len(rows)
            total += 0.7 * len(rows) * f * p
    return total


@pytest.mark.parametrize("scoring", SCORINGS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
def test_the_balance_loss_is_the_token_weighted_sum_over_sequences(scoring, masked, labelled):
    sequences = Sequences(4, torch.tensor([0, 2, 2, 0, 1, 2, 1, 2])) if labelled else Sequences(2)  # none in 3
    mask = torch.tensor([True] * 4 + [False] + [True] * 3) if masked else None
    tokens = routed(8, scoring, sequences=sequences, mask=mask)
    found, expected = BalanceLoss(coefficient=0.7)(tokens), balance_by_loop(tokens, scoring)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(loss, tokens.logits_TE) for loss in (found, expected))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_equal_loads_cost_the_coefficient_for_each_token():
    logits = torch.zeros(16, EXPERTS, dtype=torch.float64)
    ids = torch.arange(16 * TOP_K).view(16, TOP_K) % EXPERTS
    loss = BalanceLoss(coefficient=0.7)(RoutedTokens(logits, ids, SoftmaxScoring(), Sequences(2)))
    torch.testing.assert_close(loss, torch.tensor(16 * 0.7, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scoring", SCORINGS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("loss", [BalanceLoss(coefficient=0.7), ZLoss(coefficient=0.7)])
def test_gradients_are_finite_differences(scoring, loss):
    tokens = routed(6, scoring, sequences=Sequences(2), mask=torch.tensor([True] * 5 + [False]))
    assert torch.autograd.gradcheck(lambda logits: loss(tokens._replace(logits_TE=logits)), tokens.logits_TE)


def test_the_z_loss_sums_squared_log_normalizers():
    tokens = routed(6, SoftmaxScoring(), sequences=Sequences(1), mask=torch.tensor([True] * 5 + [False]))
    expected = 0.3 * tokens.logits_TE[:5].exp().sum(1).log().square().sum()
    torch.testing.assert_close(ZLoss(coefficient=0.3)(tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offsets", [[0, 3, 3, 7], [0, 7], [0, 0, 7]])
def test_sequences_by_offsets(offsets):
    sequences = Sequences.from_offsets(torch.tensor(offsets, dtype=torch.int32), 7)
    expected = [d for d, (a, b) in enumerate(pairwise(offsets)) for _ in range(a, b)]
    assert sequences.ids_T.tolist() == expected
    assert sequences.number == len(offsets) - 1


# attach_auxiliary


def test_attach_gives_the_auxiliary_a_gradient_of_one_whatever_the_upstream():
    x = torch.randn(3, 2, requires_grad=True)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = attach_auxiliary(x, w * w)
    assert torch.equal(y, x)
    for upstream in (0.0, 5.0):
        grads = torch.autograd.grad(y, (x, w), torch.full_like(y, upstream), retain_graph=True)
        assert (grads[0] == upstream).all()
        assert grads[1] == 4.0
    with pytest.raises(ValueError, match=r"a sum of no dims, found shape \(3, 2\)"):
        attach_auxiliary(x, x)


def make_layer():
    torch.manual_seed(0)
    router = TopKRouter(
        HIDDEN, EXPERTS, TOP_K, bias=True, losses=[BalanceLoss(coefficient=0.7), ZLoss(coefficient=0.3)]
    )
    return MoELayer(router, GroupedSwiGLU(EXPERTS, HIDDEN, 5), shared=SwiGLU(HIDDEN, 3)).double()


def with_explicit_loss(layer, x, upstream):
    """Gradients of the input and all parameters, the losses added by hand."""
    losses, layer.router.losses = layer.router.losses, ()
    out = layer(x)
    layer.router.losses = losses
    logits = x.flatten(0, 1) @ layer.router.weight.t() + layer.router.bias
    tokens = RoutedTokens(logits, logits.topk(TOP_K).indices, layer.router.scoring, Sequences(len(x)))
    total = (out * upstream).sum() + sum(loss(tokens) for loss in losses)
    return torch.autograd.grad(total, [x, *layer.parameters()])


def run_plain(layer, x, upstream):
    layer(x).backward(upstream)


def run_recomputed(layer, x, upstream, *, use_reentrant):
    checkpoint(layer, x, use_reentrant=use_reentrant).backward(upstream)


def run_compiled(layer, x, upstream):
    torch._dynamo.reset()
    layer.router.compile(fullgraph=True, backend="aot_eager")
    layer(x).backward(upstream)


def run_split(layer, x, upstream):
    from d9d.parallel.pipeline import backward_inputs  # noqa: PLC0415 - not in every rank of a world

    [x.grad], weights = backward_inputs([layer(x)], [upstream], [x])
    assert layer.router.weight.grad is None
    weights.run()


@pytest.mark.parametrize(
    "run",
    [
        run_plain,
        run_compiled,
        run_split,
        lambda *given: run_recomputed(*given, use_reentrant=True),
        lambda *given: run_recomputed(*given, use_reentrant=False),
    ],
    ids=["plain", "compiled", "split backward", "reentrant", "recomputed"],
)
def test_the_losses_of_a_router_are_added_once(run):
    layer = make_layer()
    torch.manual_seed(1)
    x = torch.randn(3, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    expected = with_explicit_loss(layer, x, upstream)
    layer.zero_grad()
    layer.router.expert_load.zero_()
    run(layer, x, upstream)
    for found, wanted in zip([x.grad, *(p.grad for p in layer.parameters())], expected):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert layer.router.expert_load.sum() == 3 * 4 * TOP_K


def test_there_are_no_losses_outside_of_training():
    layer = make_layer().eval()
    x = torch.randn(3, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    layer(x).backward(torch.zeros_like(x))
    assert (layer.router.weight.grad == 0).all()


# Layouts


def gradients_of(layer, batches, **options):
    layer.zero_grad()
    for batch in batches:
        layer(batch, **options).square().sum().backward()
    return [p.grad for p in layer.parameters()]


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 5), max_size=3, unique=True).map(sorted), seed=st.integers(0, 99))
def test_microbatches_change_nothing(cuts, seed):
    layer = make_layer()
    torch.manual_seed(seed)
    x = torch.randn(6, 4, HIDDEN, dtype=torch.float64)
    whole = [gradient.clone() for gradient in gradients_of(layer, [x])]
    for a, b in zip(whole, gradients_of(layer, x.tensor_split(cuts))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_packed_documents_are_sequences():
    layer = make_layer()
    x = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    offsets = torch.tensor([0, 2, 2, 5, 9])
    alone = [g.clone() for g in gradients_of(layer, [x[:, a:b] for a, b in pairwise(offsets) if a < b])]
    packed = gradients_of(layer, [x], sequences=Sequences.from_offsets(offsets, 9))
    for a, b in zip(alone, packed):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def check_layouts():
    """4 ranks as data × context: 4 × 1, 2 × 2 and 1 × 4, experts spread over all or none of them."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    x = torch.randn(4, 8, HIDDEN, dtype=torch.float64)
    mask = torch.rand(4, 8) > 0.2
    whole = make_layer()
    whole(x, mask=mask).square().sum().backward()
    for context in (1, 2, 4):
        groups = [dist.new_group(list(range(start, start + context))) for start in range(0, 4, context)]
        data_rank, context_rank = divmod(rank, context)
        rows = slice(data_rank * context, (data_rank + 1) * context)
        # Each rank has two chunks of a sequence, from both ends.
        chunks = [2 * context - 1 - context_rank, context_rank]
        columns = torch.cat([torch.arange(8).view(2 * context, -1)[chunk] for chunk in chunks])
        for spreads in (False, True):
            layer = make_layer()
            if context > 1:
                layer.set_sequence_group(groups[data_rank])
            if spreads:
                for name, parameter in list(layer.experts.named_parameters()):
                    setattr(layer.experts, name, nn.Parameter(parameter.detach().chunk(4)[rank].clone()))
                layer.set_expert_group(dist.group.WORLD)
            layer(x[rows][:, columns], mask=mask[rows][:, columns]).square().sum().backward()
            for (name, ours), theirs in zip(layer.named_parameters(), whole.parameters()):
                expected = theirs.grad
                if spreads and name.startswith("experts."):
                    expected = expected.chunk(4)[rank]
                else:
                    dist.all_reduce(ours.grad)
                torch.testing.assert_close(
                    ours.grad, expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=name, c=context: f"cp {c}: {n}: {m}"
                )


def test_data_context_and_expert_ranks_change_nothing():
    run_world(4, check_layouts)


def test_autocast_does_not_round_sums_over_documents():
    values = torch.rand(3000, EXPERTS)
    documents = Sequences.from_offsets(torch.tensor([0, 1001, 3000]), 3000)
    with torch.autocast("cpu", torch.bfloat16):
        found = documents.sum(values)
    expected = torch.stack([values[:1001].double().sum(0), values[1001:].double().sum(0)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (Sequences(5), "12 tokens are no 5 sequences of equal length"),
        (Sequences.from_offsets(torch.tensor([0, 4, 10]), 10), "the sequences are of 10 tokens, and there are 12"),
    ],
)
def test_sequences_of_other_tokens_are_refused(sequences, message):
    with pytest.raises(ValueError, match=message):
        sequences.sum(torch.ones(12, EXPERTS))
