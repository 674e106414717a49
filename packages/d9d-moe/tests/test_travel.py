"""Tokens on their way between ranks: what runs beside them, what has no expert, and anomaly detection."""

import pytest
import torch
import torch.distributed as dist

from d9d.mesh.testing import run_world
from d9d.moe import AllToAllDispatcher, LocalDispatcher
from d9d.moe._packed import PackedRows
from d9d.moe._travel import Travel

EXPERTS, HIDDEN = 8, 5


class Beside(torch.autograd.Function):
    """Work that is done while tokens travel."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log.append("beside")
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("beside")
        return 2 * grad, None


def draw(tokens, *, padding=False):
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :3].contiguous()
    probs = torch.rand(tokens, 3, dtype=torch.float64)
    if padding:
        ids[::2] = EXPERTS
        probs[::2] = 0
    return x, ids, probs.requires_grad_()


def check_work_runs_beside_both_ways(log):
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, ids, probs = draw(6)
    pending = dispatcher.dispatch_async(x, ids, probs)
    shared = Beside.apply(x, log)
    rows = pending.wait()
    out = dispatcher.combine(rows.x_NH * rows.probs_N[:, None], rows.handle) + shared
    assert log == ["start", "beside", "finish"]
    log.clear()
    out.sum().backward()
    assert log == ["start", "beside", "finish"]
    torch.testing.assert_close(out, x * probs.sum(1, keepdim=True) + 2 * x)
    torch.testing.assert_close(x.grad, (probs.sum(1, keepdim=True) + 2).expand_as(x))


def check_padding_goes_nowhere():
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, ids, probs = draw(5, padding=True)
    rows = dispatcher.dispatch(x, ids, probs)
    held = torch.tensor(len(rows.x_NH))
    dist.all_reduce(held)
    assert held == dist.get_world_size() * 2 * 3
    out = dispatcher.combine(rows.x_NH * rows.probs_N[:, None], rows.handle)
    torch.testing.assert_close(out, x * probs.sum(1, keepdim=True))


def check_anomaly_detection():
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x, ids, probs = draw(4)
    with torch.autograd.detect_anomaly(check_nan=True):
        rows = dispatcher.dispatch(x, ids, probs)
        dispatcher.combine(rows.x_NH, rows.handle).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3))


def all_checks():
    start, finish, log = Travel.start, Travel.finish, []
    try:
        Travel.start = lambda self, *way: (log.append("start"), start(self, *way))[1]
        Travel.finish = lambda self: (log.append("finish"), finish(self))[1]
        check_work_runs_beside_both_ways(log)
    finally:
        Travel.start, Travel.finish = start, finish
    check_padding_goes_nowhere()
    check_anomaly_detection()


def test_tokens_on_their_way():
    run_world(2, all_checks)


def test_padding_is_no_row_of_an_expert_that_counts():
    x, ids, probs = draw(5, padding=True)
    rows = LocalDispatcher(EXPERTS).dispatch(x, ids, probs)
    assert rows.counts_E.sum() == len(rows.x_NH) == ids.numel()
    out = LocalDispatcher(EXPERTS).combine(rows.x_NH * rows.probs_N[:, None], rows.handle)
    torch.testing.assert_close(out, x * probs.sum(1, keepdim=True))
    assert torch.equal(out[::2], torch.zeros_like(out[::2]))


@pytest.mark.parametrize("sizes", [(3, 2, 5), (0, 1), (8,)])
def test_parts_of_a_row_lie_apart_and_aligned(sizes):
    dtypes = [torch.bfloat16, torch.float32, torch.int32][: len(sizes)]
    layout = PackedRows(list(zip(sizes, dtypes)))
    packed = layout.new(4, torch.device("cpu"))
    parts = [torch.randint(0, 100, (4, size)).to(dtype) for size, dtype in zip(sizes, dtypes)]
    for view, part in zip(layout.views(packed), parts):
        assert view.storage_offset() * view.itemsize % 16 == 0
        view.copy_(part)
    for view, part in zip(layout.views(packed), parts):
        assert torch.equal(view, part)
