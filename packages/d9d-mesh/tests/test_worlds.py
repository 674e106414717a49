"""The world pool, from outside."""

import os
import signal
import sys
import time
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import Ended, JobTimeoutError, WorldError, WorldTimeoutError, run_job, run_world


@attrs.frozen
class Answer:
    rank: int
    total: torch.Tensor


def _sum_of_ranks(offset: int) -> Answer:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total)


def _pid() -> int:
    return os.getpid()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("no luck")
    dist.barrier()


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def _stuck_on_rank_1() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.1)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_returns_one_result_a_rank(size):
    answers = run_world(size, _sum_of_ranks, 10)
    assert [a.rank for a in answers] == list(range(size))
    assert {a.total.item() for a in answers} == {sum(range(size)) + 10.0 * size}


def test_a_world_stays_warm():
    assert run_world(2, _pid) == run_world(2, _pid)


def test_the_failing_rank_is_named_with_its_traceback():
    with pytest.raises(WorldError, match=r"rank 1 of 2 in _raise_on.*(?s:.)*ValueError: no luck") as caught:
        run_world(2, _raise_on, 1)
    assert caught.value.rank == 1
    assert len(run_world(2, _pid)) == 2


def test_a_rank_that_dies_is_named():
    with pytest.raises(WorldError, match="rank 0 of 2 in _exit_on died with exit code 3"):
        run_world(2, _exit_on, 0)


def test_a_world_that_was_killed_between_tests_is_replaced():
    os.kill(run_world(2, _pid)[0], signal.SIGKILL)
    time.sleep(0.2)
    assert len(run_world(2, _pid)) == 2


def test_a_stuck_world_is_killed_and_its_stack_shown():
    with pytest.raises(WorldTimeoutError, match=r"did not finish on ranks \[0, 1\](?s:.)*_stuck_on_rank_1"):
        run_world(2, _stuck_on_rank_1, timeout=1.0)


def _sum_over_a_mesh(groups_before: int) -> float:
    for _ in range(groups_before):
        dist.new_group([0])
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rows = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0), Replicate()])
    return (rows * 2).sum().full_tensor().item()


def test_what_torch_remembers_of_meshes_does_not_reach_the_next_task():
    for groups_before in (0, 1):
        assert run_world(4, _sum_over_a_mesh, groups_before) == [56.0] * 4


def test_a_local_function_is_refused():
    with pytest.raises(ValueError, match="which the ranks cannot find"):
        run_world(1, lambda: None)


def _end_like(exit_codes: list[int]) -> None:
    sys.stderr.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")
    sys.exit(exit_codes[int(os.environ["RANK"])])


def _never_end() -> None:
    time.sleep(1000)


def test_a_job_tells_how_each_rank_ended():
    assert run_job(2, _end_like, [0, 3]) == [Ended(0, "rank 0 of 2\n"), Ended(3, "rank 1 of 2\n")]
    with pytest.raises(JobTimeoutError, match=r"ranks \[0\] of _never_end did not end in 1.0 s\nrank 0:"):
        run_job(1, _never_end, timeout=1.0)


def _use_dtensors() -> None:
    mesh = DistContext.launch(MeshConfig(replicate=2), "cpu").mesh("dense")["dp_replicate"]
    nn.Parameter(distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])).full_tensor()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_of_a_task_end_with_it():
    """Those of gloo poll: hundreds in idle workers would slow every other test."""
    run_world(2, _use_dtensors)
    before = run_world(2, _threads)
    run_world(2, _use_dtensors)
    assert run_world(2, _threads) == before
