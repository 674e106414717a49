"""The Triton kernel in its interpreter against the formulas in torch: `test_triton_loss` starts this."""

import itertools

import torch

from d9d.models._cross_entropy import _launches, _triton
from d9d.models._cross_entropy._options import LossOptions
from d9d.models._cross_entropy._torch import torch_chunk_loss_


class OneShard:
    """Two halves of a vocabulary, of which the other one adds nothing: to test the way over statistics."""

    start, total = 3, 40

    def sum_(self, values):
        pass

    def max_(self, values):
        pass


def by_rows(logits):
    return logits.clone()


def by_columns(logits):
    """Columns apart, as they lie in the memory of a gradient."""
    rows, columns = logits.shape
    apart = torch.full((columns, rows + 3), torch.nan)
    apart[:, :rows] = logits.T
    return apart[:, :rows].T


_launches.MAX_BLOCK = 16  # several blocks a row
_launches.BLOCK_CLASSES, _launches.BLOCK_TOKENS, _launches.MAX_PARTS = 8, 2, 3  # and several steps of several parts
torch.manual_seed(0)
EVERYTHING = {"soft_cap": 2.0, "label_smoothing": 0.2, "z_loss": 0.1}
CHOSEN = [{}, *({name: value} for name, value in EVERYTHING.items()), EVERYTHING]
LAYOUTS = (by_rows, by_columns)
CASES = itertools.product(LAYOUTS, ((1, 1), (3, 37)), CHOSEN, (False, True), (None, OneShard()), (False, True))
for lay_out, (rows, columns), chosen, weighted, shard, with_gradient in CASES:
    logits = lay_out(torch.randn(rows, columns) * 3)
    labels = torch.randint(-1, columns, (rows,))
    weights = torch.rand(rows) if weighted else None
    kept = {"options": LossOptions(ignore_index=-1, **chosen), "shard": shard, "with_gradient": with_gradient}
    exact = logits.double()
    wanted = torch_chunk_loss_(exact, labels, weights.double() if weighted else None, **kept)
    found = _triton.triton_chunk_loss_(logits, labels, weights, **kept)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    if with_gradient:
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-6)
for lay_out in LAYOUTS:
    logits, labels, weights = torch.randn(3, 37), torch.tensor([3, 36, 30]), torch.tensor([0.0, 0.5, 2.0])
    logits[:, 3] = -torch.inf  # a label that cannot be, of a token that does not count
    in_gaps = [torch.stack((x, 5 + x), 1)[:, 0] for x in (labels, weights)]
    for shard, with_gradient in itertools.product((None, OneShard()), (False, True)):
        kept = {"options": LossOptions(), "shard": shard, "with_gradient": with_gradient}
        wanted = torch_chunk_loss_(logits.clone(), labels, weights, **kept)
        found = _triton.triton_chunk_loss_(lay_out(logits), *in_gaps, **kept)
        torch.testing.assert_close(found, wanted)
possible = torch.randn(3, 37)
possible[:, :20] = -torch.inf  # the first block has no class that can be
labels = torch.full((3,), 30)
for lay_out in LAYOUTS:
    logits = lay_out(possible)
    found = _triton.triton_chunk_loss_(logits, labels, None, options=LossOptions(), shard=None, with_gradient=True)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(possible, labels, reduction="none"))
    assert logits.isfinite().all()
nothing = _launches.Columns(torch.empty(0, 4).T, labels.new_zeros(4), None, LossOptions(), OneShard())
assert (nothing.statistics()[1:] == 0).all()  # a rank without classes
nothing.gradient_(torch.zeros(4))
_triton.SCALE_STEPS, _triton.SCALE_BLOCK = 3, 16  # several programs, the last of them in part
for dtype in (torch.bfloat16, torch.float32):
    for size in (0, 1, 48, 101):
        for factor in (torch.tensor([0.3]), torch.tensor([1.0]), torch.tensor([torch.nan])):
            gradient = torch.randn(size).to(dtype)
            wanted = gradient.clone().mul_(factor)
            _triton.triton_scale_(gradient, factor)
            rounding = 0.0 if factor == 1 else torch.finfo(dtype).eps  # the interpreter cuts digits off for bf16
            torch.testing.assert_close(gradient, wanted, rtol=rounding, atol=0, equal_nan=True)
print("right")  # noqa: T201
