"""The 8-layer card under a layout: losses, speed, memory, and how much of the communication is exposed.

    python tools/bench_layouts.py --trainer.microbatch 4 --trainer.global_batch 4
    python -m torch.distributed.run --nproc-per-node 2 tools/bench_layouts.py shard=2,expert=2 \\
        --trainer.microbatch 4 --trainer.global_batch 8

Without a layout it runs on one rank, the reference of the others: for speed on as many samples a rank, for losses on as
many in all. Options are those of the example. A kernel's exposed time is that in which nothing but communication runs.
"""

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen3_moe"
sys.path.insert(0, str(EXAMPLE))

import pretrain  # noqa: E402 - the example is a script, not a package
from stdlib_bytes import read_library  # noqa: E402

from d9d.loop import Trainer  # noqa: E402
from d9d.loop.config import load  # noqa: E402
from d9d.mesh import DistContext, MeshConfig  # noqa: E402

WARMUP, TIMED, PROFILED = 4, 8, 2
LOSS_AT = 5

Interval = tuple[float, float]


def main() -> None:
    """Train, and print what was measured."""
    layout = next((argument for argument in sys.argv[1:2] if not argument.startswith("--")), "")
    degrees = dict(pair.split("=") for pair in layout.split(",") if pair)
    mesh = MeshConfig(**{name: int(degree) for name, degree in degrees.items()})
    config = load(pretrain.PretrainConfig, EXAMPLE / "card.toml", sys.argv[1 + bool(layout) :])
    with tempfile.TemporaryDirectory() as directory, DistContext.launch(mesh, config.device) as ctx:
        config = attrs.evolve(config, trainer=attrs.evolve(config.trainer, directory=Path(directory)))
        files, _ = read_library(held_out_bytes=config.held_out_bytes)
        trainer = pretrain.build_trainer(config, files, ctx)
        if ctx.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses: list[Tensor] = []
        _train(trainer, WARMUP, losses)
        seconds = _train(trainer, TIMED, losses) / TIMED
        rate = config.trainer.global_batch * config.sequence / seconds / ctx.world_size
        memory = torch.cuda.max_memory_allocated() / 2**30 if ctx.device.type == "cuda" else 0.0
        if ctx.is_main:
            found = [f"{layout or 'one rank':<24}", f"loss {losses[LOSS_AT - 1]:.4f}, {losses[-1]:.4f}"]
            print(" · ".join([*found, f"{rate:,.0f} tokens/s/rank", f"{memory:.1f} GiB"]), flush=True)
        with profile(activities=[getattr(ProfilerActivity, ctx.device.type.upper())]) as profiler:
            _train(trainer, PROFILED, losses)
        if ctx.is_main and (lines := _communication(profiler)):
            print("   ", " · ".join(lines), flush=True)


def _train(trainer: Trainer, steps: int, losses: list[Tensor]) -> float:
    """Seconds for so many steps."""
    _synchronize(trainer.ctx)
    start = time.perf_counter()
    losses.extend(trainer.train_step().total.mean() for _ in range(steps))
    _synchronize(trainer.ctx)
    return time.perf_counter() - start


def _synchronize(ctx: DistContext) -> None:
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _communication(profiler: profile) -> list[str]:
    """For each kind of collective, its milliseconds a step and the share of them in which nothing else ran."""
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    compute = union(span for name, span in kernels if "nccl" not in name.lower())
    kinds = {
        "reductions": ("AllReduce", "ReduceScatter"),
        "gathers": ("AllGather",),
        "exchanges": ("SendRecv", "AlltoAll"),
    }
    lines = []
    for kind, words in kinds.items():
        spans = union(span for name, span in kernels if "nccl" in name.lower() and any(word in name for word in words))
        if total := length(spans):
            hidden = length(spans) + length(compute) - length(union([*spans, *compute]))
            lines.append(f"{kind} {total / PROFILED / 1e3:.1f} ms, {1 - hidden / total:.0%} exposed")
    return lines


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Interval]) -> float:
    """Of disjoint intervals."""
    return sum(end - start for start, end in spans)


if __name__ == "__main__":
    main()
