"""Head and loss, forward and backward: time and memory of each way, in one run on one GPU.

    python tools/bench_head.py

Memory is the peak beyond hidden states, weight and labels, with the two gradients in it. ``D9D`` lines are backends of
``d9d.models.linear_cross_entropy``; cut-cross-entropy is measured where it is installed.
"""

import gc
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d9d.models import (
    CutLinearCrossEntropyConfig,
    LinearCrossEntropyConfig,
    LinearCrossEntropyNeed,
    TorchLinearCrossEntropyConfig,
    TritonLinearCrossEntropyConfig,
    linear_cross_entropy,
)

SHAPES = ((16384, 2048, 151_936), (8192, 4096, 131_072))
WARMUP, TIMED = 2, 7
SMALL, LARGE = 304 << 20, 1 << 30

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear_and_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What transformers does."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def recomputed_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """2048 tokens at a time, logits made again in backward."""
    parts = [
        checkpoint(linear_and_loss, h, weight, y, use_reentrant=False)
        for h, y in zip(hidden.split(2048), labels.split(2048))
    ]
    return torch.stack(parts).sum()


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, *, backend: LinearCrossEntropyConfig, memory: int) -> Tensor:
    """A backend, with so many bytes for logits."""
    return linear_cross_entropy(hidden, weight, labels, backend=backend, max_logits_bytes=memory).sum


def ways() -> dict[str, Loss]:
    """By name."""
    found: dict[str, Loss] = {
        "linear + cross_entropy": linear_and_loss,
        "chunks of 2048, recomputed": recomputed_chunks,
    }
    need = LinearCrossEntropyNeed(device_type="cuda", dtype=torch.bfloat16)
    for name, cut in {
        "cut-cross-entropy": CutLinearCrossEntropyConfig(filters=True),
        "cut-cross-entropy, exact": CutLinearCrossEntropyConfig(),
    }.items():
        if cut.refusal(need) is None:
            found[name] = partial(ours, backend=cut, memory=0)
    rounding = TritonLinearCrossEntropyConfig(rounds_weight_gradient=True)
    for memory in (SMALL, LARGE):
        size = f"{memory >> 20} MiB"
        found[f"D9D torch, {size}"] = partial(ours, backend=TorchLinearCrossEntropyConfig(), memory=memory)
        found[f"D9D triton, {size}"] = partial(ours, backend=TritonLinearCrossEntropyConfig(), memory=memory)
        found[f"D9D triton, rounds, {size}"] = partial(ours, backend=rounding, memory=memory)
    return found


def measure(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Median milliseconds of forward and backward, peak GiB beyond what was there, and the loss of a token."""
    times, value = [], 0.0
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARMUP + TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        total = loss(hidden, weight, labels)
        total.backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        value = total.item() / len(labels)
        hidden.grad = weight.grad = None
        del total
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return statistics.median(times[WARMUP:]), peak, value


def main() -> None:
    """Print a table for each shape."""
    for tokens, size, classes in SHAPES:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = (torch.randn(classes, size, device="cuda") * 0.02).bfloat16().requires_grad_()
        labels = torch.randint(classes, (tokens,), device="cuda")
        gradients = (hidden.nbytes + weight.nbytes) / 2**30
        print(f"{tokens} x {size} x {classes}: gradients {gradients:.2f} GiB")
        reference = None
        for name, loss in ways().items():
            milliseconds, peak, value = measure(loss, hidden, weight, labels)
            reference = reference or milliseconds
            columns = (f"{milliseconds:6.1f} ms", f"x {milliseconds / reference:4.2f}", f"{peak:6.2f} GiB")
            print(f"  {name:<30}", *columns, f"loss {value:.5f}", sep="  ", flush=True)


if __name__ == "__main__":
    main()
