"""Split backward against plain autograd: random graphs, what is computed when, what stays alive in between."""

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d.parallel.pipeline._backward import backward, backward_inputs

torch.set_num_threads(1)

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
    "detached": lambda a, b: a.detach() * b,
}

instructions = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 30), st.integers(0, 30))
weights_first = st.sampled_from(["x", "w"])


def _leaf(seed: int, *, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)


def _evaluate(program: Sequence[tuple[str, int, int]], leaves: list[Tensor], outputs: list[int]) -> list[Tensor]:
    values = list(leaves)
    for name, a, b in program:
        # the newest values likely, so that graphs are deep
        values.append(OPERATIONS[name](values[-1 - a % len(values)], values[-1 - b % len(values)]))
    found = [values[-1 - o % len(values)] for o in outputs]
    return [y for y in found if y.requires_grad]


@settings(max_examples=200, deadline=None)
@given(
    program=st.lists(instructions, min_size=1, max_size=12),
    outputs=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    inputs=st.integers(0, 3),
    weights=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_a_split_backward_equals_a_whole_one(program, outputs, inputs, weights):
    def gradients(run) -> list[Tensor | None]:
        parameters = [_leaf(10 + i, requires_grad=trained) for i, trained in enumerate(weights)]
        found: list[Tensor | None] = []
        for microbatch in range(2):
            xs = [_leaf(100 * microbatch + i) for i in range(inputs)]
            ys = _evaluate(program, [*parameters, *xs], outputs)
            if ys:
                found += run(ys, [_leaf(1000 + i, requires_grad=False) for i, _ in enumerate(ys)], xs)
            assert all(x.grad is None for x in xs)
        return found + [p.grad for p in parameters]

    def split(ys, dys, xs):
        found, rest = backward_inputs(ys, dys, xs)
        rest.run()
        return found

    def plain(ys, dys, xs):
        torch.autograd.backward(ys, dys)
        found = [x.grad for x in xs]
        for x in xs:
            x.grad = None
        return found

    expected = gradients(plain)
    for run in (backward, split):
        for got, wanted in zip(gradients(run), expected, strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)
