"""The Triton kernels in their interpreter against the formulas in torch: `test_kernels` starts this."""

import itertools

import torch

from d9d.moe._gated import _launch as gated
from d9d.moe._gated._silu_mul import _formula
from d9d.moe._rows import _launch as rows
from d9d.moe._rows import ranks_of_tokens
from d9d.moe._rows._index import _stable_sort
from d9d.moe._rows._moves import _added, _copied, _of_rows

torch.manual_seed(0)
gated.MAX_BLOCK = rows.MAX_BLOCK = 16  # several blocks a row
gated.ROWS_TIMES_BLOCK = 32  # several rows a program
rows.SLOTS_OF_A_BLOCK = rows.TOKENS_OF_A_BLOCK = 16


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


for (count, size), is_fused, has_probs in itertools.product(((1, 1), (3, 37)), (False, True), (False, True)):
    gate, up = draw(count, 2 * size).chunk(2, 1)
    if not is_fused:
        gate, up = gate.clone(), up.clone()
    probs = torch.rand(count) if has_probs else None
    exact = [x.double().requires_grad_() for x in (gate, up, probs) if x is not None]
    wanted = _formula(*exact, *(() if has_probs else (None,)))
    torch.testing.assert_close(gated.forward(gate, up, probs).double(), wanted, rtol=1e-5, atol=1e-6)
    grad = draw(size, count).T  # columns are dense, not rows
    into = torch.empty(count, 2 * size).chunk(2, 1)
    grad_probs = gated.backward(grad, gate, up, probs, into=into)
    for found, expected in zip((*into, grad_probs), torch.autograd.grad(wanted, exact, grad.double())):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

for tokens, slots, destinations, size, dtype in (
    (1, 1, 1, 1, torch.int64),
    (7, 3, 5, 37, torch.int32),
    (20, 2, 70, 16, torch.int64),
    (0, 2, 3, 4, torch.int64),
):
    first = 2
    ids = (torch.rand(tokens, destinations + 4).argsort(1)[:, :slots]).to(dtype)  # some have no row
    found_row, found_count = rows.sort_by_counting(ids, destinations, first)
    row, count = _stable_sort(ids, destinations, first)
    assert torch.equal(found_row, row)
    assert torch.equal(found_count, count)
    for ranks in (1, 3):
        experts = -(-destinations // ranks)
        marked = rows.ranks_of_tokens(ids, experts, ranks)
        for found, wanted in zip(marked, ranks_of_tokens(ids, experts, ranks)):
            assert torch.equal(found.long(), wanted)
    total = int(count.sum())
    x, probs, weights = draw(tokens, size), torch.rand(tokens, slots), torch.rand(tokens, slots)
    padded = draw(total, size + 3)
    found_probs = rows.gather(x, probs, row, padded[:, :size])
    assert torch.equal(padded[:, :size], _copied(x.repeat_interleave(slots, 0), row, total))
    assert torch.equal(found_probs, _copied(probs.flatten(), row, total))
    y = padded[:, 1 : size + 1]
    for weighted in (None, weights):
        summed, back = draw(tokens, size + 2)[:, :size], draw(tokens, slots + 1)[:, :slots]
        rows.add_up(y, weighted, found_probs, row, into=(summed, back))
        torch.testing.assert_close(summed, _added(y, weighted, row))
        assert torch.equal(back, _of_rows(found_probs, row))
    into = draw(total, size + 1)[:, :size], draw(total, 6)[:, 1:3], torch.zeros(total, 4, dtype=torch.int32)[:, :2]
    numbers, names = torch.rand(tokens, 2), torch.randint(9, (tokens, 2))
    rows.pack(x, numbers, names, row, into=into)
    for found, wanted in zip(into, (x, numbers, names.int())):
        assert torch.equal(found, _copied(wanted.repeat_interleave(slots, 0), row, total))
    if total == 0:
        continue
    grad = draw(tokens, size)
    grad_y, grad_weights = rows.weigh(grad, y, weights, row)
    exact = [a.double().requires_grad_() for a in (y, weights)]
    summed = torch.einsum("tkh,tk->th", _of_rows(exact[0], row), exact[1])
    for found, expected in zip((grad_y, grad_weights), torch.autograd.grad(summed, exact, grad.double())):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
print("right")  # noqa: T201
