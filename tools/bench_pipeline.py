"""The pipeline card under every schedule: tokens/s, memory, and the measured bubble beside the simulator's.

    python -m torch.distributed.run --nproc-per-node 2 tools/bench_pipeline.py
    python -m torch.distributed.run --nproc-per-node 2 tools/bench_pipeline.py --schedules 1f1b zbv --microbatches 8

The card is 15 layers of the 30B-A3B shape with a vocabulary of 32,768, microbatches of one sequence of 4096 tokens,
AdamW included. Stages are timed by events around each computation, after what it reads has arrived; the simulator gets
the median of each kind and stage, and the time of one transfer. Random weights and tokens.
"""

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d.loop.optim import AdamW, decay_groups
from d9d.mesh import DistContext, MeshConfig, all_gather_objects, materialize
from d9d.models import CausalLMContext, CausalLMOutput
from d9d.models.qwen3_moe import Qwen3MoEConfig, Qwen3MoEForCausalLM, parallelize_qwen3_moe
from d9d.parallel import LossSum, StageInfo, global_norm, scale_and_clip_
from d9d.parallel.pipeline import Action, Costs, Executor, Op, Program, Schedule, derive, simulate, sync_stages

LAYERS = Qwen3MoEConfig(
    vocab_size=32_768,
    hidden_size=2048,
    num_layers=15,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    top_k=8,
    expert_size=768,
)
TINY = attrs.evolve(
    LAYERS,
    vocab_size=64,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=4,
    top_k=2,
    expert_size=16,
)
CARDS = {"pipeline": (LAYERS, 4096), "tiny": (TINY, 64)}
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipev")
WARMUP, TIMED = 2, 3


class Timings:
    """How long computations take on their device."""

    def __init__(self) -> None:
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, action: Action) -> Generator[None]:
        """Time the body."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((action, begin, end))

    def read(self) -> dict[tuple[Op, int], list[float]]:
        """Milliseconds by kind and stage, and forget them; the device is idle."""
        found: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for action, begin, end in self._events:
            found[action.op, action.stage].append(begin.elapsed_time(end))
        self._events.clear()
        return found


class Training:
    """This rank's stages under one placement, and an optimizer step."""

    def __init__(self, config: Qwen3MoEConfig, program: Program, ctx: DistContext) -> None:
        self.ctx, self.config = ctx, config
        self.stages: dict[int, nn.Module] = {}
        for number in program.stages_of(ctx.mesh("dense").get_local_rank("pp")):
            with torch.device("meta"):
                stage = Qwen3MoEForCausalLM(config, StageInfo(number, program.stages)).to(torch.bfloat16)
            parallelize_qwen3_moe(stage, ctx)
            materialize(stage, device=ctx.device, seed=0)
            self.stages[number] = stage
        named = [named for stage in self.stages.values() for named in stage.named_parameters()]
        self.parameters = [parameter for _, parameter in named]
        self.sync, self.runtimes = sync_stages(self.stages, splits_backward=True)
        self.optimizer = AdamW(decay_groups(named, 0.1), lr=1e-4, moment_dtype=torch.bfloat16)

    def executor(self, schedule: Schedule, timings: Timings) -> Executor[Tensor, CausalLMContext, CausalLMOutput]:
        """Runs the stages by a schedule of their placement."""
        group = self.ctx.mesh("dense").get_group("pp")
        return Executor(self.stages, schedule, group, runtimes=self.runtimes, timed=timings)

    def finish(self, weight: Tensor) -> None:
        """From gradients to the next step."""
        self.sync.finish()
        dist.all_reduce(weight, group=self.ctx.mesh("dense").get_group("pp"))
        norm = global_norm(self.parameters, pp_group=self.ctx.mesh("dense").get_group("pp"))
        scale_and_clip_(self.parameters, weight=weight, norm=norm, max_norm=1.0, nonfinite="zero")
        self.optimizer.step()


def loss_of(out: CausalLMOutput, shared: CausalLMContext) -> LossSum:
    """That of the model."""
    del shared
    assert out.loss is not None
    return out.loss


@attrs.frozen
class Found:
    """Of one schedule and number of microbatches."""

    tokens_per_second: float
    bubble: float
    simulated: float
    memory: float
    costs: Mapping[Op, float]
    """Milliseconds of each kind, the mean over stages of their medians."""

    def __str__(self) -> str:
        costs = "  ".join(f"{op.name} {self.costs[op]:.2f}" for op in Op if op in self.costs)
        bubbles = f"{self.bubble:>7.1%} {self.simulated:>7.1%}"
        return f"{self.tokens_per_second:>9,.0f} {bubbles} {self.memory:>6.1f}  {costs}"


def measure(training: Training, schedule: Schedule, microbatches: int, sequence: int, send: float) -> Found:
    """Train a few steps, and compare with the simulator."""
    ctx, device = training.ctx, training.ctx.device
    timings = Timings()
    executor = training.executor(schedule, timings)
    generator = torch.Generator().manual_seed(0)
    vocabulary = training.config.vocab_size
    tokens = torch.randint(vocabulary, (microbatches, 1, sequence), generator=generator).to(device)
    positions = torch.arange(sequence, device=device).expand(1, sequence)
    inputs = list(tokens)
    shared = [CausalLMContext(position_ids=positions, labels=part.roll(-1, 1)) for part in inputs]
    steps, passes = [], []
    torch.cuda.reset_peak_memory_stats()
    for step in range(WARMUP + TIMED):
        synchronize(ctx)
        start = time.perf_counter()
        total = executor.step(inputs, shared, loss_of)
        synchronize(ctx)
        middle = time.perf_counter()
        training.finish(total.weight)
        synchronize(ctx)
        if step < WARMUP:
            timings.read()
        else:
            steps.append(time.perf_counter() - start)
            passes.append(middle - start)
    mine = {key: statistics.median(found) for key, found in timings.read().items()}
    costs = {key: mean for of_rank in all_gather_objects(mine) for key, mean in of_rank.items()}
    program = derive(schedule.program(ranks=ctx.world_size, microbatches=microbatches))
    simulation = simulate(program, as_costs(costs, program, send))
    busy = sum(costs[a.op, a.stage] for row in program.actions for a in row if (a.op, a.stage) in costs)
    seconds = statistics.median(passes)
    return Found(
        tokens_per_second=microbatches * sequence / statistics.median(steps) / ctx.world_size,
        bubble=1 - busy / 1e3 / seconds / ctx.world_size,
        simulated=simulation.bubble,
        memory=max(all_gather_objects(torch.cuda.max_memory_allocated() / 2**30)),
        costs={op: statistics.fmean(c for (o, _), c in costs.items() if o is op) for op in {op for op, _ in costs}},
    )


def as_costs(costs: Mapping[tuple[Op, int], float], program: Program, send: float) -> Costs:
    """For the simulator, to which B is I and W: where a stage runs both, B counts, and I and W share it."""
    inputs, weights = [], []
    for stage in range(program.stages):
        of_inputs, of_weights = costs.get((Op.I, stage), 0.5), costs.get((Op.W, stage), 0.5)
        whole = costs.get((Op.B, stage), of_inputs + of_weights)
        share = of_inputs / (of_inputs + of_weights)
        inputs.append(whole * share)
        weights.append(whole * (1 - share))
    forward = [costs[Op.F, stage] for stage in range(program.stages)]
    return Costs(forward=forward, input_gradient=inputs, weight_gradient=weights, send=send)


def time_of_a_transfer(ctx: DistContext, config: Qwen3MoEConfig, sequence: int) -> float:
    """Milliseconds from rank to rank, on an idle machine."""
    message = torch.zeros(1, sequence, config.hidden_size, dtype=torch.bfloat16, device=ctx.device)
    group = ctx.mesh("dense").get_group("pp")
    seconds = []
    for _ in range(10):
        synchronize(ctx)
        start = time.perf_counter()
        if ctx.rank < 2:
            (dist.send if ctx.rank == 0 else dist.recv)(message, 1 - ctx.rank, group)
        synchronize(ctx)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def synchronize(ctx: DistContext) -> None:
    """Wait for all ranks and their devices."""
    torch.cuda.synchronize(ctx.device)
    dist.barrier()


def main() -> None:
    """Run, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--card", choices=CARDS, default="pipeline")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16, 32])
    options = parser.parse_args()
    config, sequence = CARDS[options.card]
    with DistContext.launch(MeshConfig(pipeline=-1)) as ctx:
        send = time_of_a_transfer(ctx, config, sequence)
        if ctx.is_main:
            print(f"a transfer takes {send:.2f} ms")
            print("schedule, microbatches, tokens/s/rank, bubble, simulated, GiB, ms of each computation", flush=True)
        by_placement: dict[Sequence[int], list[Schedule]] = defaultdict(list)
        for kind in options.schedules:
            schedule = Schedule.kinds()[kind]()
            placement = schedule.program(ranks=ctx.world_size, microbatches=options.microbatches[0]).rank_of_stage
            by_placement[placement].append(schedule)
        for schedules in by_placement.values():
            program = schedules[0].program(ranks=ctx.world_size, microbatches=options.microbatches[0])
            training = Training(config, program, ctx)
            for schedule in schedules:
                for microbatches in options.microbatches:
                    found = measure(training, schedule, microbatches, sequence, send)
                    if ctx.is_main:
                        print(f"{schedule.kind:<17} {microbatches:>3} {found}", flush=True)
            del training, schedule
            gc.collect()  # hooks make cycles


if __name__ == "__main__":
    main()
