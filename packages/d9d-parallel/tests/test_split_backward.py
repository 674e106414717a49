"""Split backward equals plain autograd on random graphs."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d.parallel.pipeline._backward import backward, backward_inputs
from d9d.parallel.pipeline._join import Branch, join

SIZE = 4


class Scaled(torch.autograd.Function):
    """Two operands, two outputs."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        return a * b, a + 2 * b

    @staticmethod
    def backward(ctx, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return product * b + total, product * a + 2 * total


def _block(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ (b * 1.5).t()) * b.sin() + a


def _scaled_in_place(a: Tensor, b: Tensor) -> Tensor:
    y = torch.sin(a)
    y.mul_(b)
    return y


def _column_in_place(a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    y[:, 1].mul_(b[:, 2])
    y[0] = b[1]
    return y


def _halves(a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2)
    return torch.cat([right * b[:2], left])


def _rows(a: Tensor, b: Tensor) -> Tensor:
    first, _, third, _ = (a * b).unbind()
    return torch.stack([third, first, b[0], third])


def _joined(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        outputs = (a * b, a - b)
    product, _ = join(
        outputs,
        Branch(operands=(a,), gradient=lambda dy, b: (dy[0] * b + dy[1],), saved=(b,)),
        Branch(operands=(b,), gradient=lambda dy, a: (dy[0] * a - dy[1],), saved=(a,)),
    )
    return product.tanh_()


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "multiply": torch.mul,
    "multiply by a row": lambda a, b: a * b[1],
    "add a column sum": lambda a, b: a + b.sum(1),
    "matmul": lambda a, b: torch.tanh(a @ b),
    "linear": lambda a, b: torch.tanh(nn.functional.linear(a, b, b[0])),
    "norm": lambda a, b: nn.functional.layer_norm(a, (SIZE,), b[0], b[1]),
    "batched": lambda a, b: torch.tanh(torch.bmm(a.view(2, 2, SIZE), b.expand(2, SIZE, SIZE))).reshape(SIZE, SIZE),
    "attention": lambda a, b: nn.functional.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    "power": lambda a, b: (a.tanh().square() + 1) ** b.tanh(),
    "scale in place": _scaled_in_place,
    "column in place": _column_in_place,
    "chunk": _halves,
    "unbind": _rows,
    "largest": lambda a, b: a.max(0).values + b.topk(2, dim=0).values[1] * a,
    "where": lambda a, b: torch.where(a > b, a, b),
    "python function, both outputs": lambda a, b: torch.tanh(sum(Scaled.apply(a, b))),
    "python function, one output": lambda a, b: torch.tanh(Scaled.apply(a, b)[0]),
    "checkpointed": lambda a, b: torch.tanh(checkpoint(_block, a, b, use_reentrant=False)),
    "embedding": lambda a, b: a + nn.functional.embedding(torch.tensor([3, 0, 0, 1]), b),
    "joined": _joined,
    "detached": lambda a, b: a.detach() * b,
}

instructions = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 30), st.integers(0, 30))


def _leaf(seed: int, *, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)


def _evaluate(program: Sequence[tuple[str, int, int]], values: list[Tensor], hooked: set[int], calls: Counter) -> None:
    def scale(at: int, gradient: Tensor) -> Tensor:
        calls[at] += 1
        return gradient * 1.5

    for name, a, b in program:
        # Low numbers are the newest values: hypothesis makes deep graphs then.
        values.append(OPERATIONS[name](values[-1 - a % len(values)], values[-1 - b % len(values)]))
        if len(values) in hooked and values[-1].requires_grad:
            values[-1].register_hook(functools.partial(scale, len(values)))


@settings(max_examples=300, deadline=None)
@given(
    program=st.lists(instructions, min_size=1, max_size=12),
    outputs=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    inputs=st.integers(0, 3),
    weights=st.lists(st.booleans(), min_size=1, max_size=4),
    hooked=st.sets(st.integers(0, 18)),
)
def test_a_split_backward_equals_a_whole_one(program, outputs, inputs, weights, hooked):
    def train(run: Callable) -> tuple[list[Tensor | None], Counter]:
        calls: Counter = Counter()
        parameters = [_leaf(10 + i, requires_grad=trained) for i, trained in enumerate(weights)]
        for i, p in enumerate(p for p in parameters if p.requires_grad):
            p.register_post_accumulate_grad_hook(lambda _, i=i: calls.update([f"accumulated {i}"]))
        gradients: list[Tensor | None] = []
        for microbatch in range(2):
            xs = [_leaf(100 + 10 * microbatch + i) for i in range(inputs)]
            values = [*parameters, *xs]
            _evaluate(program, values, hooked, calls)
            ys = [y for o in outputs if (y := values[-1 - o % len(values)]).requires_grad]
            if ys:
                gradients += run(ys, [_leaf(1000 + i, requires_grad=False) for i, _ in enumerate(ys)], xs)
            assert all(x.grad is None for x in xs)
        return gradients + [p.grad for p in parameters], calls

    expected, expected_calls = train(_plain)
    for run in (backward, _split):
        gradients, calls = train(run)
        assert calls == expected_calls
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert (gradient is None) == (wanted is None)
            assert gradient is None or torch.equal(gradient, wanted)


@pytest.mark.parametrize("changed", [False, True])
def test_a_weight_used_often_sums_in_the_same_order(changed):
    """Some gradients reach the weight from the input path, others by way of a transposition or a sum."""
    uses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, w: torch.tanh(x @ w),
        lambda x, w: torch.tanh(x @ w.t()),
        lambda x, w: torch.tanh(x * Scaled.apply(w, w)[1]),
    ]
    for chosen in itertools.product(uses, repeat=4):

        def train(run: Callable, chosen=chosen) -> Tensor:
            x, w = _leaf(0), _leaf(1)
            y, used = x, w * 1.5 if changed else w
            for use in chosen:
                y = use(y, used)
            run([y], [_leaf(2, requires_grad=False)], [x])
            return w.grad

        assert torch.equal(train(_split), train(_plain))


def _split(ys: list[Tensor], dys: list[Tensor], xs: list[Tensor]) -> list[Tensor | None]:
    gradients, rest = backward_inputs(ys, dys, xs)
    rest.run()
    return gradients


def _plain(ys: list[Tensor], dys: list[Tensor], xs: list[Tensor]) -> list[Tensor | None]:
    torch.autograd.backward(ys, dys)
    gradients = [x.grad for x in xs]
    for x in xs:
        x.grad = None
    return gradients
