"""Experts spread over the ranks of a job on CUDA against all of them on one: `test_dispatch_gpu` starts this."""

import os
import sys

import torch
import torch.distributed as dist

from d9d.moe import AllToAllDispatcher, LocalDispatcher

EXPERTS, HIDDEN = 8, 72
ROUTINGS = ((300, 3), (300, EXPERTS), (1, 1), (0, 2))


def draw(tokens, top_k, dtype):
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    ids = torch.rand(tokens * ranks, EXPERTS, device="cuda").argsort(1)[:, :top_k].contiguous()
    probs = torch.rand(ids.shape, device="cuda", dtype=torch.promote_types(dtype, torch.float32))
    ids[::3, 0], probs[::3, 0] = EXPERTS, 0  # some slots have no expert
    x = torch.randn(tokens * ranks, HIDDEN, device="cuda", dtype=torch.float64).to(dtype)
    return x, ids, probs


def run(dispatcher, first, x, ids, probs):
    """Values and gradients of a layer whose expert e multiplies by e + 1."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    pending = dispatcher.dispatch_async(x, ids, probs)
    beside = torch.sin(x)
    rows = pending.wait()
    factor_N = torch.repeat_interleave(
        torch.arange(len(rows.counts_E), device="cuda") + first + 1, rows.counts_E, output_size=len(rows.x_NH)
    )
    weighted_NH = (rows.x_NH * (rows.probs_N * factor_N)[:, None]).to(x.dtype)
    out = dispatcher.combine(weighted_NH, rows.handle) + beside
    grad_x, grad_probs = torch.autograd.grad(out, (x, probs), torch.cos(x.detach()))
    return out, grad_x, grad_probs.where(ids < EXPERTS, 0)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(sys.argv[1])
rank, ranks = dist.get_rank(), dist.get_world_size()
for (tokens, top_k), dtype in ((routing, dtype) for routing in ROUTINGS for dtype in (torch.float64, torch.bfloat16)):
    x, ids, probs = draw(tokens, top_k, dtype)
    wanted = run(LocalDispatcher(EXPERTS), 0, x.double(), ids, probs.double())
    mine = slice(rank * tokens, (rank + 1) * tokens)
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    found = run(dispatcher, rank * EXPERTS // ranks, x[mine], ids[mine], probs[mine])
    for a, b in zip(found, wanted):
        scale = float(b.abs().max()) if b.numel() else 1.0
        bound = 1e-12 if dtype == torch.float64 else (2 + ranks) * 2**-8
        torch.testing.assert_close(a.double(), b[mine], rtol=0, atol=bound * scale)
dist.destroy_process_group()
