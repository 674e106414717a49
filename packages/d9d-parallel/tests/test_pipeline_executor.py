"""Every schedule on ranks of gloo against plain autograd of the whole model; fp64."""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import register_dataclass

from d9d.mesh.testing import run_world
from d9d.parallel import GradientSync, LossSum
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._executor import Executor
from d9d.parallel.pipeline._schedule import Schedule
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import GPipe, LoopedBFS, OneFOneB

VOCABULARY, WIDTH = 5, 3
MICROBATCHES = (1, 2, 3, 4, 8, 16, 32)


@dataclass
class Hidden:
    x: Tensor
    extra: dict[str, Tensor]


register_dataclass(Hidden)


class Part(nn.Module):
    """A stage that sends a dataclass with a floating, an integer, and a floating leaf that nobody uses."""

    def __init__(self, index: int, count: int, device: str = "cpu") -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        torch.manual_seed(100 + index)
        if self.is_first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.bias = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.unread = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64), requires_grad=False)
        if self.is_last:
            self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
        self.to(device)

    def forward(self, inputs, shared):
        if self.is_first:
            x, ids = self.embed(inputs["ids"]), inputs["ids"]
        else:
            x, ids = inputs.x, inputs.extra["ids"]
        x = x + self.frozen * torch.tanh(self.linear(x)) + shared["mask"][..., None] * self.bias(ids)
        if self.is_last:
            return self.head(x)
        return Hidden(x, {"ids": (ids + 1) % VOCABULARY, "unused": self.unread * 2})


def batch_of(microbatches: int, device: str = "cpu"):
    """Microbatches of different shapes (case 3), one of them without any token; the labels of some are ignored."""
    generator = torch.Generator().manual_seed(microbatches)
    shapes = [(m % 3 if m else 2, 1 + m % 4) for m in range(microbatches)]
    ids = [torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes]
    labels = [torch.randint(-1, VOCABULARY, shape, generator=generator) for shape in shapes]
    masks = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return (
        [{"ids": i.to(device)} for i in ids],
        [{"mask": m.to(device), "labels": lab.to(device), "name": "train"} for m, lab in zip(masks, labels)],
    )


def loss_of(logits: Tensor, shared) -> LossSum:
    labels = shared["labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-1, reduction="sum")
    return LossSum(total, (labels >= 0).sum())


def whole_model(parts: Sequence[nn.Module], inputs, shared):
    for part in parts:
        inputs = part(inputs, shared)
    return inputs


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}


@attrs.frozen
class Expected:
    """Plain autograd in one process."""

    loss: Tensor
    weight: Tensor
    gradients: list[dict[str, Tensor]]
    outputs: list[Tensor]

    @classmethod
    @cache
    def of(cls, stages: int, microbatches: int, device: str = "cpu") -> "Expected":
        parts = [Part(stage, stages, device) for stage in range(stages)]
        inputs, shared = batch_of(microbatches, device)
        outputs = [whole_model(parts, i, s) for i, s in zip(inputs, shared)]
        losses = [loss_of(o, s) for o, s in zip(outputs, shared)]
        for loss in losses:
            loss.sum.backward()
        return cls(
            sum(loss.sum.detach() for loss in losses),
            sum(loss.weight for loss in losses),
            [gradients_of(part) for part in parts],
            [output.detach() for output in outputs],
        )


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13, check_dtype=False, msg=lambda m: f"{what}: {m}")


def assert_gradients(stages: dict[int, nn.Module], expected: Expected, what: str, *, times: int = 1) -> None:
    for stage, module in stages.items():
        for name, gradient in gradients_of(module).items():
            assert_close(gradient, times * expected.gradients[stage][name], f"{what}, stage {stage}, {name}")


def all_schedules() -> list[Schedule]:
    """Those that train, with two stages per rank where one may choose."""
    chosen = []
    for _, kind in sorted(Schedule.kinds().items()):
        may_choose = "stages_per_rank" in attrs.fields_dict(kind)
        schedule = kind(stages_per_rank=2) if may_choose else kind()
        if kind.__module__.startswith("d9d.") and schedule.program(ranks=1, microbatches=4).is_training:
            chosen.append(schedule)
    return chosen


def supports(schedule: Schedule, ranks: int, microbatches: int) -> bool:
    try:
        schedule.program(ranks=ranks, microbatches=microbatches)
    except ValueError:
        return False
    return True


def stages_of(schedule: Schedule, ranks: int, rank: int, device: str = "cpu") -> dict[int, Part]:
    microbatches = next(m for m in MICROBATCHES if supports(schedule, ranks, m))
    program = schedule.program(ranks=ranks, microbatches=microbatches)
    return {stage: Part(stage, program.stages, device) for stage in program.stages_of(rank)}


def train_under(schedule: Schedule, group: dist.ProcessGroup, counts: Sequence[int], device: str = "cpu") -> list[int]:
    """Steps of one executor with these counts of microbatches; returns those that the schedule supports."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    stages = stages_of(schedule, ranks, rank, device)
    count = ranks * schedule.stages_per_rank
    executor = Executor(stages, schedule, group)
    ran = []
    for microbatches in counts:
        if not supports(schedule, ranks, microbatches):
            continue
        what = f"{schedule}, {ranks} ranks, {microbatches} microbatches"
        expected = Expected.of(count, microbatches, device)
        inputs, shared = batch_of(microbatches, device)
        for module in stages.values():
            module.zero_grad()
        total = executor.step(inputs, shared, loss_of)
        is_last = count - 1 in stages
        assert_close(total.sum, expected.loss * is_last, f"{what}, loss")
        assert_close(total.weight, expected.weight * is_last, f"{what}, weight")
        assert total.sum.dtype == total.weight.dtype == torch.float64
        assert_gradients(stages, expected, what)
        program = derive(schedule.program(ranks=ranks, microbatches=microbatches))
        assert executor.peak_live == simulate(program).peak_live[rank], what
        if microbatches in {1, 8}:
            outputs = executor.infer(inputs, shared)
            assert len(outputs) == (microbatches if is_last else 0)
            for output, answer in zip(outputs, expected.outputs):
                assert_close(output, answer, f"{what}, inference")
                assert not output.requires_grad
        ran.append(microbatches)
    return ran


def train_all(counts: Sequence[int]) -> dict[str, list[int]]:
    group = dist.group.WORLD
    assert group is not None
    return {schedule.kind: train_under(schedule, group, counts) for schedule in all_schedules()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_gives_loss_gradients_and_outputs_of_the_whole_model(ranks):
    """Also case 3, and as many live activations as the simulator says."""
    for ran in run_world(ranks, train_all, MICROBATCHES):
        assert ran == {s.kind: [m for m in MICROBATCHES if supports(s, ranks, m)] for s in all_schedules()}
        assert all(ran.values())


def accumulate() -> None:
    group = dist.group.WORLD
    assert group is not None
    for schedule in all_schedules():
        stages = stages_of(schedule, 2, dist.get_rank())
        executor = Executor(stages, schedule, group)
        for _ in range(2):
            executor.step(*batch_of(4), loss_of)
        expected = Expected.of(2 * schedule.stages_per_rank, 4)
        assert_gradients(stages, expected, f"{schedule}", times=2)


def test_steps_accumulate_gradients():
    """Case 2."""
    run_world(2, accumulate)


def train_side_by_side() -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for schedule in all_schedules():
        assert train_under(schedule, halves[dist.get_rank() % 2], (4,)) == [4]


def test_pipelines_run_side_by_side():
    run_world(4, train_side_by_side)


class Reusing(nn.Module):
    """A stage that returns the same memory for every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Buffer(torch.zeros(4))

    def forward(self, inputs, shared):
        return self.memory.copy_(inputs + 1)


class Passing(nn.Module):
    def forward(self, inputs, shared):
        return inputs.clone()


def overwrite() -> list[float]:
    stage = {0: Reusing(), 1: Passing()}[dist.get_rank()]
    executor = Executor({dist.get_rank(): stage}, GPipe(), dist.group.WORLD)
    outputs = executor.infer([torch.full((4,), float(m)) for m in range(8)], [None] * 8)
    return [output.sum().item() for output in outputs]


def overwrite_at_home() -> None:
    executor = Executor({0: Reusing(), 1: Passing()}, LoopedBFS(stages_per_rank=2), dist.group.WORLD)
    executor.infer([torch.zeros(4)] * 2, [None] * 2)  # reads what it made before it makes more
    with pytest.raises(RuntimeError, match="overwritten before this stage read it") as error:
        executor.step([torch.zeros(4)] * 2, [None] * 2, lambda out, _: LossSum(out.sum(), torch.tensor(1)))
    assert "F of stage 1, microbatch 0" in error.value.__notes__[0]


def test_what_is_sent_may_be_overwritten():
    """Case 44; where nothing is sent, and so nothing copied, it is an error."""
    assert run_world(2, overwrite)[1] == [4.0 * (m + 1) for m in range(8)]
    run_world(1, overwrite_at_home)


class Watched(nn.Module):
    """A stage that watches its outputs and what backward saved of them."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.ones(4))
        self.outputs: list[weakref.ref[Tensor]] = []
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.most_outputs = self.most_saved = 0

    def forward(self, inputs, shared):
        microbatch = len(self.outputs)
        with saved_tensors_hooks(lambda tensor: self._save(tensor, microbatch), lambda saved: saved.tensor):
            product = inputs * self.weight
        self.most_outputs = max(self.most_outputs, sum(output() is not None for output in self.outputs))
        output = product + 1
        self.outputs.append(weakref.ref(output))
        return output

    def _save(self, tensor: Tensor, microbatch: int) -> "Saved":
        saved = Saved(tensor, microbatch)
        self.saved.add(saved)
        return saved


class Saved:
    def __init__(self, tensor: Tensor, microbatch: int) -> None:
        self.tensor, self.microbatch = tensor, microbatch


def watch() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    ranks = dist.get_world_size()
    for schedule in all_schedules():
        program = schedule.program(ranks=ranks, microbatches=8)
        stages = {stage: Watched(stage) for stage in program.stages_of(rank)}
        most = 0

        def count(module: Watched, args: object, output: object, stages=stages) -> None:
            nonlocal most
            most = max(most, sum(len({saved.microbatch for saved in s.saved}) for s in stages.values()))

        for stage in stages.values():
            stage.register_forward_hook(count)
        executor = Executor(stages, schedule, group)
        executor.step([torch.ones(4)] * 8, [None] * 8, lambda output, _: LossSum(output.sum(), torch.tensor(1)))
        assert most == executor.peak_live == simulate(derive(program)).peak_live[rank], schedule
        for number, stage in stages.items():
            if number + 1 not in stages:
                assert stage.most_outputs == 0, f"{schedule}: outputs of stage {number} outlive their send"
            assert not any(output() is not None for output in stage.outputs)
            assert not stage.saved


def test_outputs_are_freed_and_as_many_activations_live_as_the_simulator_says():
    run_world(2, watch)
    run_world(4, watch)


class Runtime:
    is_sharded = True

    def __init__(self, stage: int, events: list[str]) -> None:
        self.stage, self.events = stage, events

    def unshard(self) -> None:
        self.events.append(f"unshard {self.stage}")

    def reshard(self) -> None:
        self.events.append(f"reshard {self.stage}")

    def weight_gradients(self, *, last: bool):
        self.events.append(f"gradients {self.stage} {'last' if last else ''}".strip())
        return nullcontext()

    def reduce_gradients(self) -> None:
        self.events.append(f"reduce {self.stage}")

    def abandon(self) -> None:
        self.events.append(f"abandon {self.stage}")


def drive_runtimes() -> None:
    for schedule in all_schedules():
        stages = stages_of(schedule, 2, dist.get_rank())
        events: list[str] = []
        runtimes = {stage: Runtime(stage, events) for stage in stages}
        executor = Executor(stages, schedule, dist.group.WORLD, runtimes=runtimes)
        executor.step(*batch_of(4), loss_of)
        assert_gradients(stages, Expected.of(2 * schedule.stages_per_rank, 4), f"{schedule}")
        for stage in stages:
            mine = [event.replace(f" {stage}", "") for event in events if f" {stage}" in event]
            assert mine == ["unshard", *["gradients"] * 3, "gradients last", "reduce", "reshard"], schedule
        events.clear()
        executor.infer(*batch_of(4))
        assert sorted(events) == sorted(f"{what} {stage}" for what in ("unshard", "reshard") for stage in stages)


def test_a_stages_runtime_gathers_once_collects_each_microbatch_and_reduces_after_the_last():
    run_world(2, drive_runtimes)


class SyncRuntime(Runtime):
    """A stage whose gradients `GradientSync` collects."""

    def __init__(self, stage: int, sync: GradientSync, index: int) -> None:
        super().__init__(stage, [])
        self.sync, self.index = sync, index

    def weight_gradients(self, *, last: bool):
        return self.sync.microbatch(self.index, last=last)


def collect_gradients() -> None:
    for schedule in all_schedules():
        stages = stages_of(schedule, 2, dist.get_rank())
        sync = GradientSync([list(module.parameters()) for module in stages.values()], grad_dtype=torch.float64)
        runtimes = {stage: SyncRuntime(stage, sync, index) for index, stage in enumerate(stages)}
        executor = Executor(stages, schedule, dist.group.WORLD, runtimes=runtimes)
        for _ in range(2):
            executor.step(*batch_of(4), loss_of)
            sync.finish()
            assert_gradients(stages, Expected.of(2 * schedule.stages_per_rank, 4), f"{schedule}")


def test_gradient_sync_collects_what_any_schedule_makes():
    run_world(2, collect_gradients)


def run_a_plain_module() -> None:
    model = nn.Linear(3, 1, dtype=torch.float64)
    executor = Executor({0: model}, OneFOneB(), dist.group.WORLD)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    y = torch.randn(4, 5, 1, dtype=torch.float64)
    total = executor.step(list(x), list(y), lambda out, y: LossSum((out - y).square().sum(), torch.tensor(5)))
    assert total.weight == 20
    found = model.weight.grad.clone()
    model.zero_grad()
    (model(x) - y).square().sum().backward()
    assert_close(found, model.weight.grad, "weight")
    torch.testing.assert_close(torch.stack(executor.infer(list(x), list(y))), model(x).detach())


def test_any_module_is_a_pipeline_of_one_stage():
    run_world(1, run_a_plain_module)
