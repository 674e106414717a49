"""The chunked loss and what tokens get, against torch's own functions on whole logits in fp64."""

import gc
import sys
import weakref
from importlib.machinery import ModuleSpec

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.mesh.testing import run_world
from d9d.models import (
    CutLinearCrossEntropyConfig,
    LinearCrossEntropyNeed,
    TorchLinearCrossEntropyConfig,
    TritonLinearCrossEntropyConfig,
    VocabularyShard,
    linear_cross_entropy,
    linear_cross_entropy_backends,
    token_cross_entropy,
    token_entropies,
    token_log_probs,
    top_k_log_probs,
)

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "label_smoothing": st.sampled_from([0.1, 0.7]),
        "z_loss": st.sampled_from([1e-2, 0.5]),
        "soft_cap": st.sampled_from([0.7, 5.0]),
        "ignore_index": st.sampled_from([-1, 2]),
    },
)


@attrs.frozen
class Case:
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    token_weights: torch.Tensor | None

    @property
    def operands(self):
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad]

    def as_dtype(self, dtype):
        cast = [
            None if x is None else x.detach().to(dtype).requires_grad_(x.requires_grad) for x in attrs.astuple(self)[:3]
        ]
        return Case(*cast, self.labels, self.token_weights)


def case(shape, classes, *, size=6, ignored=0.3, index=-100, bias=False, weighted=False, seed=0, device="cpu"):
    draw = torch.Generator(device).manual_seed(seed)
    kwargs = {"dtype": torch.float64, "device": device, "generator": draw}
    labels = torch.randint(classes, shape, device=device, generator=draw)
    labels[torch.rand(shape, device=device, generator=draw) < ignored] = index
    return Case(
        torch.randn(*shape, size, **kwargs).requires_grad_(),
        torch.randn(classes, size, **kwargs).requires_grad_(),
        torch.randn(classes, **kwargs).requires_grad_() if bias else None,
        labels,
        torch.rand(shape, **kwargs) if weighted else None,
    )


def logits_of(sample, soft_cap=None):
    logits = sample.hidden.flatten(0, -2) @ sample.weight.T
    logits = logits if sample.bias is None else logits + sample.bias
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def oracle(sample, *, label_smoothing=0.0, z_loss=0.0, soft_cap=None, ignore_index=-100):
    """The loss of each token, of whole logits."""
    logits, labels = logits_of(sample, soft_cap), sample.labels.flatten()
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction="none")
    return loss + z_loss * logits.logsumexp(-1).square() * (labels != ignore_index)


def weighted_sum(losses, sample):
    return losses.sum() if sample.token_weights is None else (losses * sample.token_weights.flatten()).sum()


@settings(deadline=None, max_examples=80)
@given(
    shape=st.sampled_from([(1,), (7,), (2, 5), (3, 1, 4), (0,)]),
    classes=st.integers(3, 37),
    rows=st.integers(1, 12),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    trained=st.sampled_from([(True, True), (True, False), (False, True)]),
    upstream=st.sampled_from([1.0, -2.5, 0.0]),
    options=OPTIONS,
    bias=st.booleans(),
    weighted=st.booleans(),
)
def test_equals_the_loss_of_all_logits(shape, classes, rows, ignored, trained, upstream, options, bias, weighted):
    index = options.get("ignore_index", -100)
    sample = case(shape, classes, ignored=ignored, index=index, bias=bias, weighted=weighted)
    sample.hidden.requires_grad_(trained[0])
    sample.weight.requires_grad_(trained[1])
    loss = linear_cross_entropy(
        sample.hidden,
        sample.weight,
        sample.labels,
        bias_V=sample.bias,
        token_weights=sample.token_weights,
        max_logits_bytes=rows * classes * 8,
        **options,
    )
    expected = weighted_sum(oracle(sample, **options), sample)
    torch.testing.assert_close(loss.sum, expected, rtol=1e-12, atol=1e-12)
    kept = sample.labels != index
    torch.testing.assert_close(loss.weight, kept.sum() if not weighted else sample.token_weights[kept].sum())
    assert loss.weight.dtype == (torch.float64 if weighted else torch.int64)
    found = torch.autograd.grad(loss.sum * upstream, sample.operands)
    wanted = torch.autograd.grad(expected * upstream, sample.operands, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(1,), (7,), (2, 5), (0,)]),
    classes=st.integers(3, 37),
    rows=st.integers(1, 12),
    options=OPTIONS,
    bias=st.booleans(),
)
def test_tokens_get_losses_entropies_and_best_classes_of_all_logits(shape, classes, rows, options, bias):
    sample = case(shape, classes, index=options.get("ignore_index", -100), bias=bias)
    chunked = {"bias_V": sample.bias, "max_logits_bytes": rows * classes * 8}
    losses = token_cross_entropy(sample.hidden, sample.weight, sample.labels, **chunked, **options)
    upstream = torch.randn(shape, dtype=torch.float64)
    expected = oracle(sample, **options).view(shape)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad((x * upstream).sum(), sample.operands) for x in (losses, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    chunked["soft_cap"] = options.get("soft_cap")
    log_probs = logits_of(sample, options.get("soft_cap")).log_softmax(-1).view(*shape, classes)
    entropies = token_entropies(sample.hidden, sample.weight, **chunked)
    expected = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(entropies, expected, rtol=1e-10, atol=1e-12)
    found, wanted = (torch.autograd.grad((x * upstream).sum(), sample.operands) for x in (entropies, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)

    best = top_k_log_probs(sample.hidden, sample.weight, 3, **chunked)
    torch.testing.assert_close(best.log_probs, log_probs.topk(3).values.detach(), rtol=1e-10, atol=1e-12)
    assert torch.equal(best.classes, log_probs.topk(3).indices)


def test_log_probabilities_are_those_of_the_labels():
    sample = case((9,), 11)
    found = token_log_probs(sample.hidden, sample.weight, sample.labels)
    kept = sample.labels != -100
    wanted = logits_of(sample).log_softmax(-1)[kept, sample.labels[kept]]
    torch.testing.assert_close(found[kept], wanted)
    assert (found[~kept] == 0).all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"z_loss": 0.1}, {"soft_cap": 2.0}])
def test_gradcheck(options):
    sample = case((5,), 7, bias=True)

    def total(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, sample.labels, bias_V=bias, max_logits_bytes=1, **options).sum

    def each(hidden, weight, bias):
        return token_cross_entropy(hidden, weight, sample.labels, bias_V=bias, max_logits_bytes=1, **options)

    assert torch.autograd.gradcheck(total, sample.operands)
    assert torch.autograd.gradcheck(each, sample.operands)


def test_shifted_labels_are_those_of_the_next_position():
    sample = case((2, 6), 9)
    found = linear_cross_entropy(sample.hidden, sample.weight, sample.labels, shift=True)
    wanted = linear_cross_entropy(sample.hidden[:, :-1], sample.weight, sample.labels[:, 1:])
    torch.testing.assert_close(found.sum, wanted.sum)
    assert found.weight == wanted.weight


def test_a_loss_may_be_differentiated_twice_and_after_that_once_more():
    sample = case((5,), 7)
    loss = linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum
    first = torch.autograd.grad(loss * 3, sample.operands, retain_graph=True)
    [of_hidden] = torch.autograd.grad(loss * 3, [sample.hidden], retain_graph=True)
    last = torch.autograd.grad(loss * 3, sample.operands)
    assert torch.equal(of_hidden, first[0])
    torch.testing.assert_close(last, first, rtol=0, atol=0)


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


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation returned, and the most bytes that one made."""

    numel = 0
    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
            if not any(isinstance(x, torch.Tensor) and x.data_ptr() == out.data_ptr() for x in args):
                self.made = max(self.made, out.nbytes)
        return out


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


def test_one_token_needs_no_batch():
    sample = case((1,), 7)
    loss = linear_cross_entropy(sample.hidden[0], sample.weight, torch.tensor(3))
    torch.testing.assert_close(loss.sum, F.cross_entropy(logits_of(sample), torch.tensor([3])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"labels": torch.ones(2, dtype=torch.int64)},
            r"needs labels \(2, 3\) and a weight \(V, 4\), got labels \(2,\)",
        ),
        ({"weight_VH": torch.ones(5, 4).bfloat16()}, r"hidden is torch.float32 and the weight is torch.bfloat16: cast"),
        ({"bias_V": torch.ones(4)}, r"a weight of 5 classes needs a bias of as many, got \(4,\)"),
        ({"token_weights": torch.ones(2)}, r"token_weights are \(2,\) on cpu, labels \(2, 3\) on cpu"),
        ({"labels": torch.full((2, 3), 5)}, r"the label 5 is none of 5 classes, nor ignored \(-100\)"),
        ({"labels": torch.full((2, 3), -1)}, r"the label -1 is none of 5 classes"),
        ({"labels": torch.zeros(2, 3)}, "labels are torch.float32: give them as int64 or int32"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and less than 1"),
        ({"z_loss": -1.0}, "z_loss=-1.0 must not be negative"),
        ({"z_loss": torch.nan}, "z_loss=nan must not be negative, and finite"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be greater than 0"),
        ({"soft_cap": torch.inf}, "soft_cap=inf must be greater than 0 and finite"),
        (
            {"hidden": torch.ones(2, 3, 4).long(), "weight_VH": torch.ones(5, 4).long()},
            "hidden is torch.int64: give it in a floating dtype",
        ),
        ({"weight_VH": torch.ones(5, 4, device="meta")}, "hidden is on cpu, weight on meta: bring them together"),
        ({"labels": torch.zeros(2, 3, device="meta").long()}, "hidden is on cpu, labels on meta"),
        (
            {"token_weights": torch.ones(2, 3, device="meta")},
            r"token_weights are \(2, 3\) on meta, labels \(2, 3\) on cpu",
        ),
        ({"backend": "tritn"}, r"unknown linear cross-entropy backend 'tritn', .* did you mean 'triton'"),
        ({"backend": "triton"}, r"'triton', asked for in the configuration, runs on \['cuda'\] only"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    arguments = {"hidden": torch.ones(2, 3, 4), "weight_VH": torch.ones(5, 4), "labels": torch.zeros(2, 3).long()}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | changes))


def test_backends_say_what_they_cannot():
    choose = linear_cross_entropy_backends.choose
    assert choose(None, LinearCrossEntropyNeed(device_type="cuda", dtype=torch.bfloat16)).config.kind == "torch"
    triton = TritonLinearCrossEntropyConfig()
    assert triton.refusal(LinearCrossEntropyNeed(device_type="cuda", features=frozenset({"bias", "z_loss"}))) is None
    assert "not torch.float64" in triton.refusal(LinearCrossEntropyNeed(dtype=torch.float64))
    cut = CutLinearCrossEntropyConfig()
    assert "d9d-models[cce]" in cut.refusal(LinearCrossEntropyNeed())
    with pytest.raises(ImportError, match=r"d9d-models\[cce\]"):
        cut.build()


class Called:
    """cut-cross-entropy with the parameters of 25.1, or of later ones; keeps the settings it was called with."""

    def __init__(self, version):
        self.settings = None
        self.linear_cross_entropy = self.early if version == "early" else self.late

    def early(self, e, c, targets, *, ignore_index, softcap, reduction, filter_eps):
        self.settings = {"filter_eps": filter_eps}
        return F.cross_entropy(e @ c.T, targets, ignore_index=ignore_index, reduction=reduction)

    def late(self, e, c, targets, *, ignore_index, softcap, reduction, filter_eps, accum_e_fp32, accum_c_fp32):
        self.settings = {"filter_eps": filter_eps, "accum_e_fp32": accum_e_fp32, "accum_c_fp32": accum_c_fp32}
        return F.cross_entropy(e @ c.T, targets, ignore_index=ignore_index, reduction=reduction)


@pytest.mark.parametrize(
    ("version", "settings"),
    [("early", {"filter_eps": None}), ("late", {"filter_eps": None, "accum_e_fp32": True, "accum_c_fp32": True})],
)
def test_cut_cross_entropy_is_called_as_its_version_wants(monkeypatch, version, settings):
    called = Called(version)
    module = type(sys)("cut_cross_entropy")
    module.linear_cross_entropy = called.linear_cross_entropy
    module.__spec__ = ModuleSpec("cut_cross_entropy", None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    monkeypatch.setattr(
        CutLinearCrossEntropyConfig, "capabilities", TorchLinearCrossEntropyConfig.capabilities
    )  # the CPU will do for this
    sample = case((9,), 11, weighted=True)
    loss = linear_cross_entropy(
        sample.hidden, sample.weight, sample.labels, token_weights=sample.token_weights, backend="cce"
    )
    torch.testing.assert_close(loss.sum, weighted_sum(oracle(sample), sample), check_dtype=False)
    assert called.settings == settings


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


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}])
@pytest.mark.parametrize("ignored", [0.5, 1.0])
def test_what_is_ignored_poisons_nothing(value, options, ignored):  # case 7
    sample = case((20,), 7, bias=True, ignored=ignored)
    clean = [
        torch.autograd.grad(
            f(sample.hidden, sample.weight, sample.labels, bias_V=sample.bias, **options), sample.operands
        )
        for f in (summed, each_summed)
    ]
    with torch.no_grad():
        sample.hidden[sample.labels == -100] = value
    for f, wanted in zip((summed, each_summed), clean):
        loss = f(sample.hidden, sample.weight, sample.labels, bias_V=sample.bias, **options)
        assert loss.isfinite()
        torch.testing.assert_close(torch.autograd.grad(loss, sample.operands), wanted)


def summed(*args, **kwargs):
    return linear_cross_entropy(*args, **kwargs).sum


def each_summed(*args, **kwargs):
    return token_cross_entropy(*args, **kwargs).sum()


@pytest.mark.parametrize("function", [summed, each_summed])
def test_a_second_derivative_is_refused(function):
    sample = case((5,), 7)
    loss = function(sample.hidden, sample.weight, sample.labels)
    with pytest.raises(RuntimeError, match=r"no second derivative|no autograd formula"):
        sum(x.square().sum() for x in torch.autograd.grad(loss, sample.operands, create_graph=True)).backward()


def test_a_class_that_cannot_be_adds_nothing_to_an_entropy():
    sample = case((5,), 7, bias=True)
    with torch.no_grad():
        sample.bias[-1] = -torch.inf
    found = token_entropies(sample.hidden, sample.weight, bias_V=sample.bias).sum()
    wanted = token_entropies(sample.hidden, sample.weight[:-1], bias_V=sample.bias[:-1]).sum()
    torch.testing.assert_close(found, wanted)
    pairs = (torch.autograd.grad(x, sample.operands) for x in (found, wanted))
    torch.testing.assert_close(*pairs)


def test_weights_are_shifted_with_their_labels():
    sample = case((2, 6), 9, weighted=True)
    found = linear_cross_entropy(
        sample.hidden, sample.weight, sample.labels, token_weights=sample.token_weights, shift=True
    )
    wanted = linear_cross_entropy(
        sample.hidden[:, :-1], sample.weight, sample.labels[:, 1:], token_weights=sample.token_weights[:, 1:]
    )
    torch.testing.assert_close(found.sum, wanted.sum)
    torch.testing.assert_close(found.weight, wanted.weight)
    with pytest.raises(ValueError, match="shift=True needs labels of at least one dim"):
        linear_cross_entropy(sample.hidden[0, 0], sample.weight, sample.labels[0, 0], shift=True)


def test_fake_tensors_pass():
    with FakeTensorMode():
        sample = case((5,), 7)
        linear_cross_entropy(sample.hidden, sample.weight, sample.labels).sum.backward()
        token_log_probs(sample.hidden, sample.weight, sample.labels).sum().backward()
        assert top_k_log_probs(sample.hidden, sample.weight, 2).classes.shape == (5, 2)


@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, False, False), (False, True, True), (False, False, False)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_operators_are_as_torch_wants_them(needs, has_bias):
    hidden, weight = torch.randn(5, 6).bfloat16(), torch.randn(7, 6)
    bias, labels = torch.randn(7).bfloat16() if has_bias else None, torch.randint(7, (5,))
    needs = [*needs[:2], needs[2] and has_bias]
    checks = ("test_schema", "test_faketensor")
    options = (-100, 0.1, 1e-2, 3.0, None, 0, 2)  # as of `LossOptions`, no split vocabulary, two tokens a chunk
    common = (hidden, weight, bias, labels)
    dtypes = (torch.float32, torch.float32)  # of logits and of the weight's gradient
    for operator, arguments in {
        torch.ops.d9d.linear_cross_entropy.default: (*common, None, *options, needs, "torch", *dtypes),
        torch.ops.d9d.token_scores.default: (*common, *options),
        torch.ops.d9d.token_scores_backward.default: (torch.rand(5), torch.rand(5, 1), *common, *options, needs),
        torch.ops.d9d.top_k_log_probs.default: (hidden, weight, 3, bias, 3.0, None, 0, 2),
    }.items():
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_token_functions_compile_to_one_graph_over_token_counts():
    def score(hidden, weight, labels, bias):
        losses = token_cross_entropy(hidden * 2, weight, labels, bias_V=bias, label_smoothing=0.1, z_loss=1e-2)
        best = top_k_log_probs(hidden, weight, 3)
        return (losses * best.log_probs[:, 0]).sum() + token_entropies(hidden, weight, soft_cap=3.0).sum()

    torch._dynamo.reset()
    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(score, fullgraph=True, backend=frames, dynamic=True)
    for tokens in (5, 8, 13, 21, 34):
        sample = case((tokens,), 11, bias=True)
        arguments = (sample.hidden, sample.weight, sample.labels, sample.bias)
        found, expected = compiled(*arguments), score(*arguments)
        torch.testing.assert_close(found, expected)
        pairs = (torch.autograd.grad(x, sample.operands) for x in (found, expected))
        torch.testing.assert_close(*pairs)
    assert frames.frame_count <= 2  # torch 2.11 compiles a second time, and then no more


def test_compiles_with_settings_of_a_backend_and_a_weight_that_is_transposed(monkeypatch):
    asked = []
    build = TorchLinearCrossEntropyConfig.build
    monkeypatch.setattr(TorchLinearCrossEntropyConfig, "build", lambda self: asked.append(self) or build(self))
    sample = case((5,), 7)
    weight = sample.weight.detach().T.contiguous().T.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(summed, fullgraph=True, backend="aot_eager")
    first, second = TorchLinearCrossEntropyConfig(), TorchLinearCrossEntropyConfig()
    for config in (first, second, first):
        found = compiled(sample.hidden, weight, sample.labels, backend=config)
        [gradient] = torch.autograd.grad(found, [weight])
        torch.testing.assert_close(gradient, torch.autograd.grad(oracle(sample).sum(), [sample.weight])[0])
    assert any(config is first for config in asked)
    assert any(config is second for config in asked)  # not the graph of the first


def test_compiles_under_autocast():
    def score(hidden, weight, labels):
        total = linear_cross_entropy(hidden * 2, weight, labels).sum
        return total + token_entropies(hidden, weight).sum() + top_k_log_probs(hidden, weight, 2).log_probs.sum()

    torch._dynamo.reset()
    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    sample = case((9,), 11).as_dtype(torch.float32)
    found = []
    for function in (compiled, score):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(function(sample.hidden, sample.weight, sample.labels))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(x, sample.operands) for x in found))


def test_compiles_to_one_graph_without_recompilation_over_token_counts():
    def mean(hidden, weight, labels, bias):
        loss = linear_cross_entropy(hidden * 2, weight, labels, bias_V=bias, label_smoothing=0.1, z_loss=1e-2)
        return loss.sum / loss.weight

    torch._dynamo.reset()
    frames = CompileCounter()
    compiled = torch.compile(mean, fullgraph=True, backend=frames, dynamic=True)
    for tokens in (5, 8, 13, 21, 34):
        sample = case((tokens,), 11, bias=True)
        arguments = (sample.hidden, sample.weight, sample.labels, sample.bias)
        found, expected = compiled(*arguments), mean(*arguments)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, sample.operands), torch.autograd.grad(expected, sample.operands)
        )
    assert frames.frame_count == 1


def split_vocabulary(options_of):
    """Every rank's numbers of several cases, each on the whole and on this rank's part."""
    group = dist.group.WORLD
    found = []
    for classes, options in options_of:
        sample = case((7,), classes, bias=True, weighted=True)
        shard = VocabularyShard(group, classes)
        held = slice(shard.start, shard.start + shard.held)
        part = attrs.evolve(
            sample,
            weight=sample.weight.detach()[held].requires_grad_(),
            bias=sample.bias.detach()[held].requires_grad_(),
        )
        kept = {"bias_V": part.bias, "shard": shard, "max_logits_bytes": 3 * 8 * shard.length}
        loss = linear_cross_entropy(
            part.hidden, part.weight, part.labels, token_weights=part.token_weights, **kept, **options
        )
        whole = weighted_sum(oracle(sample, **options), sample)
        torch.testing.assert_close(loss.sum, whole, rtol=1e-12, atol=1e-12)
        assert_parts(loss.sum, whole, part, sample, held)
        losses = token_cross_entropy(part.hidden, part.weight, part.labels, **kept, **options)
        entropies = token_entropies(part.hidden, part.weight, **kept, soft_cap=options.get("soft_cap"))
        log_probs = logits_of(sample, options.get("soft_cap")).log_softmax(-1)
        upstream = torch.arange(1.0, 8, dtype=torch.float64)
        assert_parts(losses @ upstream, oracle(sample, **options) @ upstream, part, sample, held)
        assert_parts(entropies @ upstream, -(log_probs.exp() * log_probs).sum(-1) @ upstream, part, sample, held)
        best = top_k_log_probs(part.hidden, part.weight, 3, **kept, soft_cap=options.get("soft_cap"))
        torch.testing.assert_close(best.log_probs, log_probs.topk(3).values.detach())
        assert torch.equal(best.classes, log_probs.topk(3).indices)
        found.append(loss.sum.item())
    return found


def assert_parts(found, wanted, part, sample, held):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    of_hidden, *of_part = torch.autograd.grad(found, part.operands)
    expected, *of_whole = torch.autograd.grad(wanted, sample.operands)
    torch.testing.assert_close(of_hidden, expected, rtol=1e-10, atol=1e-12)
    for mine, all_of_it in zip(of_part, of_whole, strict=True):
        torch.testing.assert_close(mine, all_of_it[held], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_vocabulary_split_over_ranks_is_the_whole(ranks):
    everything = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}
    # 5 classes on 4 ranks: two, two, one, none
    cases = [(classes, options) for classes in (5, 12, 13) for options in ({}, everything)]
    found = run_world(ranks, split_vocabulary, cases)
    assert all(rank == found[0] for rank in found)


def test_a_part_of_another_size_is_refused():
    [message] = run_world(1, refused_part)
    assert "rank 0 of 1 holds 4 of 4 classes, got a weight of 5" in message


def refused_part():
    shard = VocabularyShard(dist.group.WORLD, 4)
    try:
        linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2).long(), shard=shard)
    except ValueError as error:
        return str(error)
    return ""
