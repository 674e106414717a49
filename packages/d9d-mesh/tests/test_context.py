"""Launch, meshes and what happens when a rank fails."""

import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import WorldError, run_job, run_world


def _coordinates(config: MeshConfig) -> dict[str, list[int]]:
    context = DistContext.launch(config, "cpu")
    return {d: list(context.mesh(d).get_coordinate() or []) for d in ("dense", "batch", "expert", "world")}


def test_ranks_are_numbered_with_the_pipeline_slowest_and_tensor_fastest():
    seen = run_world(8, _coordinates, MeshConfig(replicate=2, shard=2, tensor=2, expert=2))
    for rank, at in enumerate(seen):
        replicate, shard, tensor = rank // 4, rank // 2 % 2, rank % 2
        assert at["dense"] == [0, replicate, shard, tensor]
        assert at["batch"] == [0, rank // 2, 0, tensor]
        # inner = 4, so experts split a shard group: two of them are ep, two ep_shard
        assert at["expert"] == [0, replicate, rank // 2 % 2, rank % 2]
        assert at["world"] == [rank]


def _own_domain() -> tuple[float, str]:
    context = DistContext.launch(MeshConfig(replicate=4), "cpu")
    mesh = context.add_domain("pairs", {"pair": 2, "member": 2})
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=context.mesh("pairs").get_group("pair"))
    with pytest.raises(ValueError, match=r"domain 'odd' of \{'a': 3\} takes 3 ranks, and there are 4"):
        context.add_domain("odd", {"a": 3})
    with pytest.raises(KeyError, match="no domain 'sparse': there are dense, batch, expert, world, pairs"):
        context.mesh("sparse")
    return total.item(), str(mesh.mesh_dim_names)


def test_own_domains():
    assert run_world(4, _own_domain) == [(2.0, "('pair', 'member')"), (4.0, "('pair', 'member')")] * 2


def _threads() -> int:
    return int(re.findall(r"Threads:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def _many_launches(*, raises: bool) -> list[int]:
    counts = []
    for _ in range(20):
        with (
            pytest.raises(ArithmeticError, match="in the body") if raises else nullcontext(),
            DistContext.launch(MeshConfig(replicate=2, shard=2), "cpu") as context,
        ):
            mesh = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
            rows = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate(), Shard(0)])
            assert (rows * 2).sum().full_tensor() == 56  # torch takes the sum's mesh from a cache
            context.add_domain("own", {"own": 4})
            counts.append(_threads())
            if raises:
                raise ArithmeticError("in the body")
    return counts


def _many_launches_both_ways() -> list[int]:
    return _many_launches(raises=False) + _many_launches(raises=True)


def test_many_launches_in_a_job_that_goes_on_have_one_set_of_process_groups():
    for counts in run_world(4, _many_launches_both_ways):
        assert counts[-1] == counts[1]


def test_a_single_process_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with DistContext.launch(MeshConfig(), "cpu") as context:
        assert context.world_size == 1
        assert context.is_main
        assert context.mesh("expert").shape == (1, 1, 1, 1)
        with context.main_process_first():
            pass
    assert not dist.is_initialized()
    with DistContext.launch(MeshConfig(), "cpu") as again:
        assert again.rank == 0


def _main_first() -> list[float]:
    context = DistContext.launch(MeshConfig(replicate=2), "cpu")
    times = [time.monotonic()]
    with context.main_process_first():
        times.append(time.monotonic())
        if context.is_main:
            time.sleep(0.3)
    return times


def test_main_process_first_waits_for_the_main_process():
    (_, main), (begun, other) = run_world(2, _main_first)
    assert other >= main + 0.3
    assert begun < other


def _main_fails_first() -> str:
    context = DistContext.launch(MeshConfig(replicate=2), "cpu")
    try:
        with context.main_process_first():
            if context.is_main:
                raise OSError("disk full")
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def test_a_failure_in_main_process_first_reaches_every_rank():
    main, other = run_world(2, _main_fails_first)
    assert main == "OSError: disk full"
    assert other.startswith("RuntimeError: rank 0 failed in main_process_first")
    assert "disk full" in other


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("broken forward")


def _fail_in_forward(context: DistContext) -> None:
    Broken()(torch.ones(1))


def _fail_in_hook(context: DistContext) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    x.sum().backward()


def _fail_as_main(context: DistContext) -> None:
    with context.main_process_first():
        raise OSError("nothing to prepare")


def _failing_job(fail: Callable[[DistContext], None], rank: int) -> None:
    with DistContext.launch(MeshConfig(replicate=-1), "cpu") as context:
        if context.rank == rank:
            fail(context)
        elif fail is _fail_as_main:
            with context.main_process_first():
                pass
        dist.barrier()
        dist.barrier()


@pytest.mark.parametrize(
    ("fail", "rank", "cause"),
    [
        (_fail_in_forward, 0, "ArithmeticError: broken forward"),
        (_fail_in_hook, 1, "ZeroDivisionError"),
        (_fail_as_main, 0, "OSError: nothing to prepare"),
    ],
)
def test_an_exception_on_one_rank_ends_all_ranks_with_its_traceback(fail, rank, cause):
    """Case 45."""
    ranks = run_job(2, _failing_job, fail, rank)
    assert all(ended.exit_code for ended in ranks), ranks
    assert all(cause in ended.output for ended in ranks), ranks


def _raise_in_main_first() -> None:
    context = DistContext.launch(MeshConfig(replicate=2), "cpu")
    with context.main_process_first():
        if not context.is_main:
            raise OSError("only here")
    dist.barrier()


def test_a_failure_of_another_rank_in_main_process_first_is_its_own():
    with pytest.raises(WorldError, match="only here") as caught:
        run_world(2, _raise_in_main_first)
    assert caught.value.rank == 1


def _launch_twice() -> None:
    with DistContext.launch(MeshConfig(replicate=-1), "cpu"):
        dist.barrier()
    with DistContext.launch(MeshConfig(replicate=-1), "cpu") as context:
        dist.barrier()
        time.sleep(1.5 * context.rank)
        sys.stdout.write("leaves\n")
        sys.exit(0)


def test_ranks_may_launch_again_and_leave_by_a_successful_exit():
    for ended in run_job(2, _launch_twice):
        assert ended.exit_code == 0, ended
        assert "leaves" in ended.output
        assert "SystemExit" not in ended.output


def test_a_launch_that_fails_leaves_no_process_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def broken(self, name, dims):
        raise OSError("no mesh")

    monkeypatch.setattr(DistContext, "add_domain", broken)
    with pytest.raises(OSError, match="no mesh"):
        DistContext.launch(MeshConfig(), "cpu")
    assert not dist.is_initialized()
