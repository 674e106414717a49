"""The mixture of experts of the 8-layer card: its kernels, its layer, and its experts spread over GPUs.

    python tools/bench_moe.py --host                                                   # the host's part; on CPU too
    python tools/bench_moe.py                                                          # one GPU
    python -m torch.distributed.run --standalone --nproc-per-node 2 tools/bench_moe.py # and spread over two
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m d9d.mesh.testing.gpu_rank 1 \\
        tools/bench_moe.py --memory                                                    # two ranks on one

Times are medians of forward and backward in milliseconds, bytes those that must move. Each line gives the ratio to a
reference that is measured in the same run.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d.moe import AllToAllDispatcher, GroupedSwiGLU, LocalDispatcher, MoELayer, TopKRouter, silu_mul
from d9d.moe._grouped_mm import torch_grouped_mm
from d9d.moe._rows import gather_rows, group_by_destination, sum_rows
from d9d.moe._travel import Route

TOKENS, HIDDEN, EXPERTS, TOP_K, INTERMEDIATE = 16_384, 2048, 128, 8, 768
DENSE = (65_536, 4096)
WARMUP, TIMED = 5, 15
CALLS = 20
HOST_TOKENS, HOST_HIDDEN = 16, 64
HOST_WARMUP, HOST_TIMED = 50, 300
STEPS = 4
"""Of a layer in a row, as in training, where the host is ahead of the device."""


def median_ms(run: Callable[[], object], *, calls: int = 1) -> float:
    """Median time of one call; short ones in a row, so that their launches do not count."""
    times: list[float] = []
    for _ in range(WARMUP + TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times[WARMUP:])


def random(*shape: int) -> Tensor:
    """Numbers with a gradient."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def both_ms(forward: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Median times of forward and of backward."""
    out = forward()
    upstream = torch.randn_like(out)
    backward = median_ms(lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True), calls=CALLS)
    with torch.no_grad():
        return median_ms(forward, calls=CALLS), backward


def copy_rate() -> float:
    """TB/s of a device copy, read and written."""
    source = torch.empty(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e9


@torch.no_grad()
def kernel_ms(run: Callable[[], object]) -> float:
    """Median time of a short call."""
    return median_ms(run, calls=CALLS)


def bench_kernels() -> None:
    """Rates of the kernels against that of a copy."""
    copy = copy_rate()
    print(f"device copy: {copy:.2f} TB/s")

    def line(name: str, milliseconds: float, size: int) -> None:
        rate = size / milliseconds / 1e9
        print(f"  {name:<44} {milliseconds:6.3f} ms  {rate:5.2f} TB/s  x {rate / copy:4.2f} of the copy", flush=True)

    rows, size = DENSE
    gate_up = random(rows, 2 * size)
    forward, backward = both_ms(lambda: silu_mul(gate_up), [gate_up])
    one = gate_up.nbytes // 2
    line(f"SiLU·mul {rows} x {size} forward", forward, 3 * one)
    line(f"SiLU·mul {rows} x {size} backward", backward, 5 * one)
    del gate_up

    rows = TOKENS * TOP_K
    gate_up, probs = random(rows, 2 * INTERMEDIATE), torch.rand(rows, device="cuda", requires_grad=True)
    forward, backward = both_ms(lambda: silu_mul(gate_up, probs), [gate_up, probs])
    one = gate_up.nbytes // 2
    line(f"SiLU·mul·prob {rows} x {INTERMEDIATE} forward", forward, 3 * one)
    line(f"SiLU·mul·prob {rows} x {INTERMEDIATE} backward", backward, 5 * one)

    ids = torch.rand(TOKENS, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].contiguous()
    index = group_by_destination(ids, EXPERTS, rows=rows)
    line("sort slots by expert", kernel_ms(lambda: group_by_destination(ids, EXPERTS, rows=rows)), 2 * ids.nbytes)
    line("  torch: argsort", kernel_ms(lambda: ids.flatten().argsort(stable=True)), 2 * ids.nbytes)
    x, y = random(TOKENS, HIDDEN), random(rows, HIDDEN)
    moved = x.nbytes + y.nbytes
    line("tokens to rows", kernel_ms(lambda: gather_rows(x, index)), moved)
    line("rows to tokens", kernel_ms(lambda: sum_rows(y, index)), moved)
    token = ids.flatten().argsort(stable=True) // TOP_K
    line("  torch: index_select of tokens", kernel_ms(lambda: x.index_select(0, token)), moved)


def make_layer() -> MoELayer:
    """The layer of the card, with a real random router."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = MoELayer(TopKRouter(HIDDEN, EXPERTS, TOP_K), GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE))
    return layer.to(torch.bfloat16)


def step(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    """Forward and backward into fresh gradients."""

    def run() -> None:
        module(x).backward(upstream)
        module.zero_grad()
        x.grad = None

    return run


def grouped_products_ms(layer: MoELayer, x: Tensor) -> float:
    """The layer's grouped products alone, with its real counts."""
    routing = layer.router(x)
    counts = LocalDispatcher(EXPERTS).dispatch(x, routing.ids_TK, routing.probs_TK).counts_E
    total = 0.0
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        rows = random(TOKENS * TOP_K, weight.shape[2])
        upstream = torch.randn(TOKENS * TOP_K, weight.shape[1], device="cuda", dtype=torch.bfloat16)

        def product(rows: Tensor = rows, weight: Tensor = weight, upstream: Tensor = upstream) -> None:
            torch.autograd.grad(torch_grouped_mm(rows, weight, counts), (rows, weight), upstream)

        total += median_ms(product, calls=STEPS)
    return total


def transformers_block(layer: MoELayer) -> nn.Module | None:
    """The same layer of transformers with its grouped_mm experts, if it is installed."""
    try:
        from transformers import Qwen3MoeConfig  # noqa: PLC0415
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock  # noqa: PLC0415
    except ImportError:
        return None
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=INTERMEDIATE,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"  # noqa: SLF001 - models set it from_pretrained
    with torch.device("cuda"):
        block: nn.Module = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    parameters = {
        "gate.weight": layer.router.weight,
        "experts.gate_up_proj": layer.experts.gate_up_proj,
        "experts.down_proj": layer.experts.down_proj,
    }
    block.load_state_dict({name: value.detach() for name, value in parameters.items()})
    return block


def bench_layer(*, profile: bool) -> None:
    """The layer against its grouped products and against transformers."""
    layer = make_layer()
    x = random(4, TOKENS // 4, HIDDEN)
    upstream = torch.randn_like(x)
    peak = peak_gib(step(layer, x, upstream))
    ours = median_ms(step(layer, x, upstream), calls=STEPS)
    products = grouped_products_ms(layer, x.detach().flatten(0, 1))
    print(f"layer of the card, {TOKENS} tokens: {ours:.2f} ms, {peak:.2f} GiB beyond weights")
    print(f"  its grouped products alone: {products:.2f} ms, {products / ours:.1%} of it")
    if (block := transformers_block(layer)) is not None:
        with torch.no_grad():
            difference = (block(x) - layer(x)).abs().max() / layer(x).abs().max()
        theirs = median_ms(step(block, x, upstream), calls=STEPS)
        print(
            f"  transformers, grouped_mm experts: {theirs:.2f} ms, x {theirs / ours:.2f}; differs by {difference:.1e}"
        )
    if profile:
        print_kernels(step(layer, x, upstream))


def print_kernels(run: Callable[[], None]) -> None:
    """Where the time goes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    spent: dict[str, tuple[float, int]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            time, count = spent.get(event.name, (0.0, 0))
            spent[event.name] = time + event.self_device_time_total / 1e3, count + 1
    total = sum(time for time, _ in spent.values())
    print(f"  kernels, {total:.2f} ms in all:")
    for name, (time, count) in sorted(spent.items(), key=lambda item: -item[1][0]):
        if time > total / 500:
            print(f"    {time:6.3f} ms  {time / total:5.1%}  {count:3d} x  {name[:110]}")


def spread_(layer: MoELayer, group: dist.ProcessGroup) -> None:
    """Leave each rank its block of the experts."""
    for name in ("gate_up_proj", "down_proj"):
        block = getattr(layer.experts, name).detach().chunk(group.size())[group.rank()].clone()
        setattr(layer.experts, name, nn.Parameter(block))
    layer.set_expert_group(group)


def peak_gib(run: Callable[[], None]) -> float:
    """What a pass holds at most, beyond what is there; the first pass compiles."""
    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def bench_memory(group: dist.ProcessGroup) -> None:
    """Peak memory of a layer whose experts are spread over all ranks, on the first one; no time is taken."""
    layer = make_layer()
    torch.manual_seed(1 + group.rank())
    x = random(TOKENS, HIDDEN)
    run = step(layer, x, torch.randn_like(x))
    whole = peak_gib(run)
    spread_(layer, group)
    spread = peak_gib(run)
    if group.rank() == 0:
        print(f"{group.size()} ranks: {spread:.2f} GiB beyond weights, {whole:.2f} with all experts on each")


def bench_spread(group: dist.ProcessGroup) -> None:
    """Experts spread over all ranks: the way there and back against one exchange, and the layer against itself."""
    rank, ranks = group.rank(), group.size()
    layer = make_layer()
    torch.manual_seed(1 + rank)
    x = random(TOKENS, HIDDEN)
    upstream = torch.randn_like(x)
    alone = median_ms(step(layer, x, upstream), calls=STEPS)

    with torch.no_grad():
        routing = layer.router(x)
        dispatcher = AllToAllDispatcher(EXPERTS, group)
        rows = dispatcher.dispatch(x, routing.ids_TK, routing.probs_TK)
        route: Route = rows.handle.route
        sent, received = x.new_empty(sum(route.sends), HIDDEN), x.new_empty(sum(route.receives), HIDDEN)
        splits = list(route.receives), list(route.sends)
        one = median_ms(lambda: dist.all_to_all_single(received, sent, *splits), calls=STEPS)
        there = median_ms(lambda: dispatcher.dispatch(x, routing.ids_TK, routing.probs_TK), calls=STEPS)
        back = median_ms(lambda: dispatcher.combine(rows.x_NH, rows.handle), calls=STEPS)

    spread_(layer, group)
    peak = peak_gib(step(layer, x, upstream))
    spread = median_ms(step(layer, x, upstream), calls=STEPS)
    if rank == 0:
        print(f"{ranks} GPUs: one all_to_all_single of the tokens sent {one:.3f} ms")
        print(f"  dispatch {there:.3f} ms, x {there / one:.2f}; combine {back:.3f} ms, x {back / one:.2f}")
        print(f"  layer {spread:.2f} ms, {TOKENS / spread:.0f} tokens/ms a GPU, {peak:.2f} GiB beyond weights")
        print(f"  with all experts on each GPU {alone:.2f} ms: {alone / spread:.1%} of its tokens/s a GPU")


def host_us(run: Callable[[], object]) -> float:
    """Median time until a call returns on an idle device; almost none of it is the device's."""
    times: list[float] = []
    for _ in range(HOST_WARMUP + HOST_TIMED):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[HOST_WARMUP:])


def bench_host() -> None:
    """What the host spends on the way there and back of a few tokens, on one rank: on CUDA it launches, on CPU it does
    all of the work, with other operations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    x = torch.randn(HOST_TOKENS, HOST_HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.rand(HOST_TOKENS, EXPERTS, device=device).argsort(1)[:, :TOP_K].contiguous()
    probs = torch.rand(HOST_TOKENS, TOP_K, device=device, requires_grad=True)
    upstream = torch.randn_like(x)

    rows = dispatcher.dispatch(x, ids, probs)
    there = [rows.x_NH, rows.probs_N]
    upstream_there = [torch.randn_like(y) for y in there]
    y = rows.x_NH.detach().requires_grad_()
    back = dispatcher.combine(y, rows.handle)
    one = torch.empty_like(y)
    for name, run in (
        ("one all_to_all_single", lambda: dist.all_to_all_single(one, y.detach(), [len(y)], [len(y)])),
        ("dispatch", lambda: dispatcher.dispatch(x, ids, probs)),
        ("dispatch, backward", lambda: torch.autograd.grad(there, [x, probs], upstream_there, retain_graph=True)),
        ("combine", lambda: dispatcher.combine(y, rows.handle)),
        ("combine, backward", lambda: torch.autograd.grad(back, y, upstream, retain_graph=True)),
    ):
        print(f"  host, {device}, {HOST_TOKENS} tokens: {name:<24} {host_us(run):6.0f} us", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="list the kernels of the layer")
    parser.add_argument("--host", action="store_true", help="only the time that the host spends")
    parser.add_argument("--memory", action="store_true", help="only the memory of experts spread over ranks")
    arguments = parser.parse_args()
    if arguments.host:
        bench_host()
        return
    if "WORLD_SIZE" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        assert dist.group.WORLD is not None
        (bench_memory if arguments.memory else bench_spread)(dist.group.WORLD)
        dist.destroy_process_group()
        return
    bench_kernels()
    bench_host()
    bench_layer(profile=arguments.profile)


if __name__ == "__main__":
    main()
