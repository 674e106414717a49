"""Head and loss, forward and backward: time and memory of each way, in one run on one GPU.

    python tools/bench_head.py

Memory is the peak beyond hidden states, weight and labels: with the two gradients in it, and beyond these. ``D9D``
lines are backends of ``d9d.models.linear_cross_entropy``; cut-cross-entropy is measured where it is installed. Weight
and gradients are bf16 unless a line says otherwise, products always. A way starts when the GPU has rested, since a warm
one clocks lower.
"""

import gc
import statistics
import time
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
REST_SECONDS = 1.5
SMALL, LARGE = 304 << 20, 1 << 30

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[Tensor], Tensor] | None
"""Of the weight."""


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


def autocast_linear_and_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same with an fp32 weight."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return linear_and_loss(hidden, weight, labels)


def with_fp32_gradient(weight: Tensor) -> Tensor:
    """The same weight, whose gradient stays as it was summed."""
    leaf = weight.detach().requires_grad_()
    leaf.grad_dtype = torch.float32
    return leaf


def as_fp32(weight: Tensor) -> Tensor:
    """A weight of fp32."""
    return weight.detach().float().requires_grad_()


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


def wide_ways() -> dict[str, tuple[Loss, Prepare]]:
    """By name, with what they make of the weight."""
    triton = partial(ours, backend=TritonLinearCrossEntropyConfig(), memory=SMALL)
    return {
        "fp32 weight: autocast, linear": (autocast_linear_and_loss, as_fp32),
        "fp32 weight: D9D triton, 304 MiB": (triton, as_fp32),
        "fp32 gradient: D9D triton, 304 MiB": (triton, with_fp32_gradient),
    }


def measure(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, float, float, float]:
    """Median milliseconds of forward and backward, peak GiB beyond what was there, the gradients', a token's loss."""
    times, value, gradients = [], 0.0, 0
    gc.collect()
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
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
        gradients = sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)
        hidden.grad = weight.grad = None
        del total
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return statistics.median(times[WARMUP:]), peak, gradients / 2**30, value


def main() -> None:
    """Print a table for each shape."""
    for tokens, size, classes in SHAPES:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = (torch.randn(classes, size, device="cuda") * 0.02).bfloat16().requires_grad_()
        labels = torch.randint(classes, (tokens,), device="cuda")
        print(f"{tokens} x {size} x {classes}: ms, x the first, GiB, GiB beyond the gradients")
        reference = None
        measured: dict[str, tuple[Loss, Prepare]] = {name: (loss, None) for name, loss in ways().items()}
        for name, (loss, prepare) in (measured | wide_ways()).items():
            prepared = weight if prepare is None else prepare(weight)
            milliseconds, peak, gradients, value = measure(loss, hidden, prepared, labels)
            reference = reference or milliseconds
            columns = (f"{milliseconds:6.1f} ms", f"x {milliseconds / reference:4.2f}", f"{peak:6.2f} GiB")
            print(f"  {name:<36}", *columns, f"{peak - gradients:6.2f} GiB", f"loss {value:.5f}", sep="  ", flush=True)


if __name__ == "__main__":
    main()
