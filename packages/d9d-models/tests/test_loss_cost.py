"""What the loss and the scores of tokens multiply and hold, in forward and on each side of a split backward pass."""

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from d9d.models import linear_cross_entropy, token_cross_entropy, token_entropies, token_log_probs

sys.path.insert(0, str(Path(__file__).parent))
from loss_cases import Largest, case, logits_of, oracle


@pytest.fixture
def products(monkeypatch):
    """Shapes of the matrix products that are made."""
    made = []
    for name in ("mm", "addmm"):
        plain = getattr(torch, name)

        def product(*args, plain=plain, **kwargs):
            out = plain(*args, **kwargs)
            made.append(tuple(out.shape))
            return out

        monkeypatch.setattr(torch, name, product)
    return made


def test_one_product_for_the_loss_three_with_gradients_four_for_tokens(products):
    sample = case((10,), 80, size=4)
    with torch.no_grad():
        linear_cross_entropy(sample.hidden, sample.weight, sample.labels)
    assert products == [(10, 80)]
    products.clear()
    linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum.backward()
    assert products == [(10, 80), (10, 4), (80, 4)]
    products.clear()
    token_cross_entropy(sample.hidden, sample.weight, sample.labels).sum().backward()
    assert products == [(10, 80), (10, 80), (10, 4), (80, 4)]


def test_holds_one_chunk_of_logits(products):
    sample = case((10,), 80, size=4)
    linear_cross_entropy(sample.hidden, sample.weight, sample.labels, max_logits_bytes=3 * 80 * 8).sum.backward()
    assert products == [*[(3, 80), (3, 4), (80, 4)] * 3, (1, 80), (1, 4), (80, 4)]


def test_logits_that_fit_into_the_gradient_of_the_weight_take_no_memory_and_no_chunks(products):
    sample = case((10,), 80, size=10)
    fits = {"max_logits_bytes": 2 * 80 * 8}
    wanted = torch.autograd.grad(oracle(sample).sum(), sample.operands)
    found = linear_cross_entropy(sample.hidden, sample.weight, sample.labels, **fits).sum
    assert products == [(10, 80), (10, 10), *[(8, 10)] * 10]  # half of the memory holds the gradient of 8 classes
    torch.testing.assert_close(torch.autograd.grad(found, sample.operands), wanted)
    products.clear()
    transposed = sample.weight.detach().T.contiguous().T.requires_grad_()  # so is its gradient: no class in one piece
    found = linear_cross_entropy(sample.hidden, transposed, sample.labels, **fits).sum
    assert products == [(2, 80), (2, 10), (80, 10)] * 5
    torch.testing.assert_close(torch.autograd.grad(found, [sample.hidden, transposed]), wanted)


def test_the_loss_of_logits_within_the_gradient_takes_no_memory_of_their_size():
    sample, most = case((64,), 1024, size=64), 8 * 1024 * 8
    with profile(profile_memory=True) as profiled:
        linear_cross_entropy(sample.hidden, sample.weight, sample.labels, soft_cap=3.0, max_logits_bytes=most)
    taken = [event.self_cpu_memory_usage for event in profiled.events()]
    assert [size for size in taken if size > most] == [sample.weight.nbytes]


def test_a_gradient_that_replaces_logits_is_made_within_half_of_their_memory(products):
    sample = case((8,), 2000, size=8)
    linear_cross_entropy(sample.hidden, sample.weight, sample.labels, max_logits_bytes=3 * 2000 * 8)
    assert products == [(8, 2000), (8, 8), *[(250, 8)] * 8]  # 375 classes have room, tiles are of 256


@pytest.mark.parametrize(
    ("tokens", "most", "taken"),
    [(10, 9, [5, 5]), (10, 10, [10]), (1100, 1024, [768, 332]), (3000, 1100, [1024, 1024, 952])],
)
def test_chunks_are_even_and_aligned_where_they_are_large(tokens, most, taken, products):
    sample = case((tokens,), 80, size=4)
    with torch.no_grad():
        linear_cross_entropy(sample.hidden, sample.weight, sample.labels, max_logits_bytes=most * 80 * 8)
        token_log_probs(sample.hidden, sample.weight, sample.labels, max_logits_bytes=most * 80 * 8)
    found = [rows for rows, _ in products]
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert sum(found) == 2 * tokens
    assert found[: len(taken)] == taken


def test_a_pass_for_the_input_runs_nothing_of_the_weight():
    sample = case((10,), 80, size=4)
    loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum
    with Largest() as largest:
        torch.autograd.grad(loss, [sample.hidden], retain_graph=True)
    assert largest.numel == sample.hidden.numel()
    with Largest() as largest:
        torch.autograd.grad(loss, [sample.weight])
    assert largest.numel == sample.weight.numel()


def entropies_of(hidden, weight, labels, *, bias_V):
    del labels
    return token_entropies(hidden, weight, bias_V=bias_V)


def split_case(function):
    """Scores by the function and of whole logits, with the sides that a split backward pass asks for."""
    sample = case((10,), 80, size=4, bias=True)
    found = function(sample.hidden, sample.weight, sample.labels, bias_V=sample.bias)
    log_probs = logits_of(sample).log_softmax(-1)
    wanted = -(log_probs.exp() * log_probs).sum(-1) if function is entropies_of else oracle(sample)
    return sample, found, wanted, ([sample.hidden], [sample.weight, sample.bias])


SCORES = [token_cross_entropy, entropies_of]
FORWARD, OF_HIDDEN, OF_WEIGHT = (10, 80), (10, 4), (80, 4)


@pytest.mark.parametrize("function", SCORES)
def test_a_split_backward_of_tokens_computes_one_side_and_a_whole_one_both_of_the_same_logits(function, products):
    sample, found, wanted, sides = split_case(function)
    upstream = torch.randn(10, dtype=torch.float64)
    expected = torch.autograd.grad(wanted, sample.operands, upstream)
    orders = [(sides[0], sides[1]), (sides[1], sides[0])]
    made = {id(sides[0]): [FORWARD, OF_HIDDEN], id(sides[1]): [FORWARD, OF_WEIGHT]}
    for order in orders:
        gradients = {}
        for side in order:
            products.clear()
            gradients[id(side)] = torch.autograd.grad(found, side, upstream, retain_graph=True)
            assert products == made[id(side)]
        together = (*gradients[id(sides[0])], *gradients[id(sides[1])])
        torch.testing.assert_close(together, expected, rtol=1e-10, atol=1e-12)
    products.clear()
    whole = torch.autograd.grad(found, sample.operands, upstream, retain_graph=True)
    assert products == [FORWARD, OF_HIDDEN, OF_WEIGHT]
    torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12)
    products.clear()
    found.backward(upstream)
    assert products == [FORWARD, OF_HIDDEN, OF_WEIGHT]
    assert all(torch.equal(x.grad, gradient) for x, gradient in zip(sample.operands, whole))


@pytest.mark.parametrize("function", SCORES)
def test_what_a_failed_pass_has_computed_is_not_taken_by_the_next(function):
    sample, found, wanted, _ = split_case(function)

    def fail(of_inputs, of_outputs):
        raise RuntimeError("planted")

    handle = node_of(found, "_HiddenBackward").register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        found.sum().backward(retain_graph=True)
    handle.remove()
    [of_weight] = torch.autograd.grad(found.sum() * 2, [sample.weight])
    torch.testing.assert_close(of_weight, torch.autograd.grad(wanted.sum() * 2, [sample.weight])[0])


def node_of(x, name):
    """The node of this name in the graph of x."""
    nodes = [x.grad_fn]
    while nodes[-1].name() != name:
        nodes[-1:] = [node for node, _ in nodes[-1].next_functions if node is not None]
    return nodes[-1]


@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ()])
def test_what_is_frozen_takes_no_product(trained, products):
    sample = case((10,), 80, size=4, bias=True)
    for name in ("hidden", "weight", "bias"):
        getattr(sample, name).requires_grad_(name in trained)
    losses = token_cross_entropy(sample.hidden, sample.weight, sample.labels, bias_V=sample.bias)
    assert losses.requires_grad == bool(trained)
    if trained:
        torch.testing.assert_close(
            torch.autograd.grad(losses.sum(), sample.operands),
            torch.autograd.grad(oracle(sample).sum(), sample.operands),
        )
    made = {"hidden": [OF_HIDDEN], "weight": [OF_WEIGHT], "bias": []}
    assert products == [FORWARD] * (1 + bool(trained)) + [shape for name in trained for shape in made[name]]


def test_graphs_of_token_functions_free_themselves():
    gc.disable()
    try:
        sample = case((10,), 80)
        losses = token_cross_entropy(sample.hidden, sample.weight, sample.labels)
        hidden = weakref.ref(sample.hidden)
        del sample, losses
        assert hidden() is None
    finally:
        gc.enable()
