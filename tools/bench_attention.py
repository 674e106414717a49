"""Norms, rotation and the attention block of the 8-layer card, forward and backward, in one run on one GPU.

    python tools/bench_attention.py

Kernels are compared with a copy of as many bytes and with torch, a block with its four matrix products and the best
kernel of scaled_dot_product_attention, each measured alone; the backends that are installed, with each other. The GPU
has work before each measurement, so that it does not wait for the CPU to launch; times are medians.
"""

import functools
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from d9d.attn import (
    AttentionMask,
    AttentionNeed,
    Documents,
    Feature,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RotaryConfig,
    RotaryEmbedding,
    add_rms_norm,
    attention_backends,
    norm_and_rotate,
    rms_norm,
)

ROWS, COLUMNS = 32768, 4096
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
BATCHES = ((4, 4096), (1, 32768))
WARMUP, TIMED = 2, 9

Run = Callable[[], object]


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


class Bench:
    """Measures in one run, and prints."""

    def __init__(self) -> None:
        self._operand = randn(8192, 8192)

    def milliseconds(self, run: Run, calls: int = 5) -> float:
        """The median time of one call."""
        times: list[float] = []
        for _ in range(WARMUP + TIMED):
            for _ in range(4):
                torch.mm(self._operand, self._operand)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / calls)
        return statistics.median(times[WARMUP:])

    def copy_rate(self) -> float:
        """TB/s, read and written."""
        source = randn(ROWS, COLUMNS)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.milliseconds(lambda: target.copy_(source)) / 1e9

    def backward(self, outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> float:
        """Milliseconds of the gradients of operands."""
        upstream = [torch.randn_like(y) for y in outputs]
        return self.milliseconds(lambda: torch.autograd.grad(outputs, operands, upstream, retain_graph=True))


def report(name: str, milliseconds: float, moved: int, copy: float, reference: float | None = None) -> None:
    """Print a line; ``moved`` bytes, and the time of a reference."""
    rate = moved / milliseconds / 1e9
    against = "" if reference is None else f"   x {milliseconds / reference:4.2f} of torch"
    print(f"  {name:<34} {milliseconds:7.3f} ms  {rate:5.2f} TB/s  {rate / copy:5.2f} of a copy{against}", flush=True)


def norms(bench: Bench, copy: float) -> None:
    """Norms of the shape of FIGURES.md."""
    print(f"RMSNorm, {ROWS} x {COLUMNS}")
    x, residual, weight = randn(ROWS, COLUMNS, grad=True), randn(ROWS, COLUMNS, grad=True), randn(COLUMNS, grad=True)
    size = x.nbytes

    def theirs() -> Tensor:
        return F.rms_norm(x, (COLUMNS,), weight, 1e-6)

    with torch.no_grad():
        report("forward", bench.milliseconds(lambda: rms_norm(x, weight)), 2 * size, copy, bench.milliseconds(theirs))
        added = bench.milliseconds(lambda: F.rms_norm(x + residual, (COLUMNS,), weight, 1e-6))
        report(
            "with residual, forward",
            bench.milliseconds(lambda: add_rms_norm(x, residual, weight)),
            4 * size,
            copy,
            added,
        )
    y, other = rms_norm(x, weight), theirs()
    both, reference = bench.backward([y], [x, weight]), bench.backward([other], [x, weight])
    report("backward", both, 3 * size, copy, reference)
    report("backward, input alone", bench.backward([y], [x]), 3 * size, copy, bench.backward([other], [x]))
    report("backward, weight alone", bench.backward([y], [weight]), 2 * size, copy, bench.backward([other], [weight]))
    made = add_rms_norm(x, residual, weight)
    report("with residual, backward", bench.backward(made, [x, residual, weight]), 4 * size, copy)


def rotation(bench: Bench, copy: float) -> None:
    """Norm and rotation of q and k at the card's shape."""
    batch, length = BATCHES[0]
    print(f"QK norm + rotary, {batch} x {length} tokens, {HEADS} + {KV_HEADS} heads of {HEAD_DIM}")
    q, k = randn(batch, length, HEADS, HEAD_DIM, grad=True), randn(batch, length, KV_HEADS, HEAD_DIM, grad=True)
    weights = [randn(HEAD_DIM, grad=True) for _ in range(2)]
    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=HEAD_DIM))(
        torch.arange(length, device="cuda").expand(batch, length)
    )
    size, table = q.nbytes + k.nbytes, cos.nbytes  # of each table one half is read

    def turn(q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return norm_and_rotate(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight)

    with torch.no_grad():
        report("forward", bench.milliseconds(lambda: turn(*weights)), 2 * size + table, copy)
        report("forward, rotary alone", bench.milliseconds(lambda: turn(None, None)), 2 * size + table, copy)
    report("backward", bench.backward(turn(*weights), [q, k, *weights]), 3 * size + table, copy)
    report("backward, rotary alone", bench.backward(turn(None, None), [q, k]), 2 * size + table, copy)


def both_ways(bench: Bench, forward: Callable[[], Tensor], operands: Sequence[Tensor]) -> float:
    """Milliseconds of forward and of the gradients of operands."""
    upstream = torch.randn_like(forward())
    return bench.milliseconds(lambda: torch.autograd.grad(forward(), operands, upstream), calls=2)


def best_kernel(bench: Bench, batch: int, length: int) -> tuple[float, str]:
    """Of scaled_dot_product_attention, causal."""
    q, k, v = (randn(batch, heads, length, HEAD_DIM, grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            time = both_ways(
                bench, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), [q, k, v]
            )
        found.append((time, backend.name.lower()))
    return min(found)


def block(bench: Bench, batch: int, length: int) -> None:
    """The card's attention block against its parts."""
    config = GroupedQueryAttentionConfig(
        hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, qk_norm=True
    )
    attention = GroupedQueryAttention(config).cuda().bfloat16()
    positions = torch.arange(length, device="cuda").expand(batch, length)
    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=HEAD_DIM))(positions)
    x, mask = randn(batch, length, HIDDEN, grad=True), AttentionMask()
    products = 0.0
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        y = randn(batch, length, linear.in_features, grad=True)
        products += both_ways(bench, functools.partial(linear, y), [y, linear.weight])
    kernel, name = best_kernel(bench, batch, length)
    parameters = list(attention.parameters())
    whole = both_ways(bench, lambda: attention(x, cos=cos, sin=sin, mask=mask), [x, *parameters])
    print(f"Attention block, {batch} x {length} tokens, forward + backward")
    print(f"  four products {products:.3f} ms, scaled_dot_product_attention ({name}) {kernel:.3f} ms")
    print(f"  block {whole:.3f} ms: {100 * (whole / (products + kernel) - 1):.1f} % beyond their sum", flush=True)


def backends(bench: Bench, name: str, mask: AttentionMask, *, batch: int, length: int, sinks: bool = False) -> None:
    """Backends that can, on heads of the card's shape."""
    print(f"Attention, {name}, {batch} x {length} tokens, forward + backward")
    q, k, v = (randn(batch, length, heads, HEAD_DIM, grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    sink = randn(HEADS, grad=True) if sinks else None
    operands = [q, k, v] if sink is None else [q, k, v, sink]
    features = {Feature.GROUPED_QUERY, *mask.features} | ({Feature.SINKS} if sinks else set())
    need = AttentionNeed(features=frozenset(features), device_type="cuda", dtype=torch.bfloat16, head_dim=HEAD_DIM)
    for kind, config_class in attention_backends.classes.items():
        config = config_class()
        if kind == "eager" or config.refusal(need) is not None:
            continue
        attend = functools.partial(config.build(), q, k, v, mask, scale=HEAD_DIM**-0.5, sinks_H=sink)
        time = both_ways(bench, attend, operands)
        print(f"  {kind:<20} {time:7.3f} ms", flush=True)


def main() -> None:
    torch.manual_seed(0)
    bench = Bench()
    copy = bench.copy_rate()
    print(f"copy of {ROWS} x {COLUMNS}: {copy:.2f} TB/s")
    norms(bench, copy)
    rotation(bench, copy)
    for batch, length in BATCHES:
        block(bench, batch, length)
    for batch, length in BATCHES:
        backends(bench, "causal", AttentionMask(), batch=batch, length=length)
    documents = Documents.from_lengths([[4096] * 4], device="cuda")
    backends(bench, "documents of 4096", AttentionMask(documents=documents), batch=1, length=16384)
    for sinks in (False, True):
        name = "a window of 1024" + (" and sinks" if sinks else "")
        backends(bench, name, AttentionMask(window=1024), batch=4, length=4096, sinks=sinks)


if __name__ == "__main__":
    main()
