"""What is wrong with a step is said on every rank, before anything is sent; then a good step runs (case 46)."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_job, run_world
from d9d.parallel import LossSum
from d9d.parallel.pipeline._executor import Executor
from d9d.parallel.pipeline._program import Program
from d9d.parallel.pipeline._schedule import Schedule
from d9d.parallel.pipeline.schedules import LoopedBFS, OneFOneB


class Scale(nn.Module):
    """A stage that does as its shared tree says."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.full((3,), 2.0 + stage, dtype=torch.float64))
        self.instead = lambda output: output

    def forward(self, inputs: Tensor, shared):
        match shared["fault"]:
            case "raise" if self.stage == 1:
                raise ArithmeticError("no such number")
            case "leaf" if self.stage == 0:
                return [inputs * self.weight, object()]
        return self.instead(inputs * self.weight)


def loss_of(output: Tensor, shared) -> LossSum:
    if shared["fault"] == "loss":
        return output.sum()
    return LossSum(output.sum(), torch.tensor(output.shape[0]))


def batch(*sizes: int, fault: str = "", shared: int | None = None, dtype=torch.float64):
    return (
        [torch.ones(size, 3, dtype=dtype) for size in sizes],
        [{"fault": fault} for _ in range(len(sizes) if shared is None else shared)],
    )


def check_good_step(executor: Executor, stages: dict[int, nn.Module], count: int) -> None:
    for module in stages.values():
        module.zero_grad()
    executor.step(*batch(2, 5), loss_of)
    weights = torch.stack([torch.full((3,), 2.0 + stage, dtype=torch.float64) for stage in range(count)])
    for stage, module in stages.items():
        torch.testing.assert_close(module.weight.grad, 7 * weights.prod(0) / weights[stage])


GOOD = batch(2, 5)
BAD = {
    "length mismatch on one rank": (
        {1: batch(2, 5, shared=1)},
        ValueError,
        "rank 1 of the pipeline: 2 inputs and 1 shared were given",
    ),
    "length mismatch on all": ({0: batch(2, shared=3), 1: batch(2, shared=3)}, ValueError, "1 inputs and 3 shared"),
    "empty on one rank": ({0: ([], [])}, ValueError, "rank 0 of the pipeline: no microbatch was given"),
    "empty on all": ({0: ([], []), 1: ([], [])}, ValueError, "no microbatch was given: a step takes at least one"),
    "other number": ({1: batch(2, 5, 1)}, ValueError, "rank 0 of the pipeline was given 2 microbatches, and rank 1 3"),
    "other shape": (
        {1: batch(2, 4)},
        ValueError,
        r"microbatch 1 differs .* on rank 1, inputs: it is float64 \(4, 3\), and not float64 \(5, 3\) as on rank 0",
    ),
    "other dtype": ({0: batch(2, 5, dtype=torch.float32)}, ValueError, r"it is float64 \(2, 3\), and not float32"),
    "other structure": (
        {1: ([(tensor,) for tensor in GOOD[0]], GOOD[1])},
        ValueError,
        "microbatch 0 differs .* on rank 1, inputs: its structure is",
    ),
    "other constant": (
        {1: batch(2, 5, fault="none")},
        ValueError,
        r"on rank 1, shared: \['fault'\] is 'none', and not '' as on rank 0",
    ),
}


def bad_then_good() -> None:
    rank = dist.get_rank()
    for schedule in (OneFOneB(), LoopedBFS(stages_per_rank=2)):
        count = 2 * schedule.stages_per_rank
        stages = {stage: Scale(stage) for stage in range(rank, count, 2)}
        executor = Executor(stages, schedule, dist.group.WORLD)
        check_good_step(executor, stages, count)
        for given, kind, message in BAD.values():
            with pytest.raises(kind, match=message):
                executor.step(*given.get(rank, GOOD), loss_of)
            with pytest.raises(kind, match=message):
                executor.infer(*given.get(rank, GOOD))
            check_good_step(executor, stages, count)


def test_bad_batches_are_refused_on_every_rank_and_a_good_step_follows():
    run_world(2, bad_then_good)


class Runtime:
    def __init__(self) -> None:
        self.abandoned = 0

    is_sharded = True

    def unshard(self) -> None: ...
    def reshard(self) -> None: ...
    def reduce_gradients(self) -> None: ...

    def weight_gradients(self, *, last: bool):
        return nullcontext()

    def abandon(self) -> None:
        self.abandoned += 1


def fail_inside() -> None:
    stages = {0: Scale(0), 1: Scale(1)}
    runtimes = {0: Runtime(), 1: Runtime()}
    executor = Executor(stages, LoopedBFS(stages_per_rank=2), dist.group.WORLD, runtimes=runtimes)

    check_good_step(executor, stages, 2)

    def refuse(fault: str, kind: type[Exception], message: str, note: str) -> None:
        inputs, shared = batch(2, 5, 2)
        shared[1]["fault"] = fault
        with pytest.raises(kind, match=message) as error:
            executor.step(inputs, shared, loss_of)
        (found,) = error.value.__notes__
        assert re.fullmatch(rf"in {note}, action \d+ of rank 0 of the pipeline", found)
        check_good_step(executor, stages, 2)

    refuse("raise", ArithmeticError, "no such number", "F of stage 1, microbatch 1")
    refuse(
        "leaf",
        TypeError,
        r"stage 0 returned what cannot travel: \[1\] is an object of builtins.object",
        "F of stage 0, microbatch 1",
    )
    refuse("loss", TypeError, "the loss returned tensor.*: return a LossSum", "F of stage 1, microbatch 1")
    assert [runtime.abandoned for runtime in runtimes.values()] == [3, 3]

    def stop(_: Tensor) -> None:
        raise FloatingPointError("stop here")

    hook = stages[0].weight.register_hook(stop)
    with pytest.raises(FloatingPointError, match="stop here") as error:
        executor.step(*batch(2, 5), loss_of)
    assert "B of stage 0, microbatch 0" in error.value.__notes__[0]
    hook.remove()
    check_good_step(executor, stages, 2)


def return_something_else() -> None:
    stages = {0: Scale(0), 1: Scale(1)}
    executor = Executor(stages, LoopedBFS(stages_per_rank=2), dist.group.WORLD)
    executor.step(*batch(2, 5), loss_of)
    for instead, message in (
        (lambda output: output[:1], r"it is float64 \(1, 3\), and not float64 \(2, 3\)"),
        (lambda output: [output], "its structure is"),
    ):
        stages[0].instead = instead
        with pytest.raises(ValueError, match=f"stage 0 returned something else .* look the same: {message}") as error:
            executor.step(*batch(2, 5), loss_of)
        assert "in F of stage 0, microbatch 0" in error.value.__notes__[0]
        stages[0].instead = lambda output: output
        check_good_step(executor, stages, 2)


def test_a_stage_that_does_not_return_what_others_await_is_refused():
    run_world(1, return_something_else)


class WithAuxiliary(nn.Module):
    def forward(self, inputs: Tensor, shared):
        return (inputs, inputs.square().sum()) if self.training else (inputs,)


class First(nn.Module):
    def forward(self, inputs, shared):
        return inputs[0]


def return_less_in_evaluation() -> None:
    stages = {0: WithAuxiliary(), 1: First()}
    executor = Executor(stages, LoopedBFS(stages_per_rank=2), dist.group.WORLD)
    for _ in range(2):
        executor.step(*batch(2, 5), loss_of)
        stages[0].eval()
        assert [len(output) for output in executor.infer(*batch(2, 5))] == [2, 5]
        stages[0].train()


def test_a_stage_may_return_less_in_evaluation():
    run_world(1, return_less_in_evaluation)


def test_what_fails_inside_a_stage_names_it_and_its_microbatch_and_a_good_step_follows():
    run_world(1, fail_inside)


def fail_on_one_rank() -> None:
    with DistContext.launch(MeshConfig(pipeline=2), "cpu") as context:
        executor = Executor({context.rank: Scale(context.rank)}, OneFOneB(), context.mesh("dense").get_group("pp"))
        executor.step(*batch(2, 5, fault="raise"), loss_of)


def test_what_fails_on_one_rank_ends_all_of_them_with_stage_and_microbatch_named():
    for ended in run_job(2, fail_on_one_rank, timeout=60):
        assert ended.exit_code != 0
        assert "ArithmeticError: no such number" in ended.output
        assert re.search(r"in F of stage 1, microbatch 0, action \d+ of rank 1 of the pipeline", ended.output)


def refuse_holdings() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD

    def refused(stages: dict[int, nn.Module], message: str, *, schedule=None, **more: object) -> None:
        with pytest.raises(ValueError, match=message):
            Executor(stages, schedule or OneFOneB(), group, **more)

    refused({0: Scale(0)}, r"the ranks were given the stages \{0: \[0\], 1: \[0\]\}.*give each of the stages 0 to 1")
    refused({rank: Scale(rank)}, "the schedule has 2 on each of 2 ranks", schedule=LoopedBFS(stages_per_rank=2))
    refused({0: Scale(0)} if rank == 0 else {}, r"1: \[\]")
    refused({rank: Scale(rank)}, r"rank 0 was given runtimes of the stages \[1\], and holds \[0\]", runtimes={1: None})
    swapped = Executor({1 - rank: Scale(1 - rank)}, OneFOneB(), group)
    with pytest.raises(ValueError, match=r"places the stages on the ranks \[0, 1\], and they were given to \[1, 0\]"):
        swapped.step(*batch(2), loss_of)


def test_stages_that_do_not_fit_the_schedule_are_refused_on_every_rank():
    run_world(2, refuse_holdings)


class EvenOnly(OneFOneB):
    def program(self, *, ranks: int, microbatches: int) -> Program:
        if microbatches % 2:
            raise ValueError(f"microbatches={microbatches!r}: the nearest supported count is {microbatches + 1}")
        return super().program(ranks=ranks, microbatches=microbatches)


def refuse_a_count() -> None:
    rank = dist.get_rank()
    stages = {rank: Scale(rank)}
    executor = Executor(stages, EvenOnly(), dist.group.WORLD)
    with pytest.raises(ValueError, match="microbatches=3: the nearest supported count is 4"):
        executor.step(*batch(1, 2, 3), loss_of)
    check_good_step(executor, stages, 2)


def test_a_number_of_microbatches_that_the_schedule_does_not_have_is_refused_on_every_rank():
    run_world(2, refuse_a_count)


def refuse_inference_alone() -> None:
    schedule = Schedule.kinds()["inference"]()
    executor = Executor({0: Scale(0)}, schedule, dist.group.WORLD)
    with pytest.raises(ValueError, match="has no backward: call infer"):
        executor.step(*batch(2), loss_of)
    assert len(executor.infer(*batch(2))) == 1


def test_a_schedule_without_backward_does_not_train():
    run_world(1, refuse_inference_alone)
