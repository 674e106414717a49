"""Launch, meshes and what happens when a rank fails."""

import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import WorldError, run_world


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
            pytest.raises(ArithmeticError) if raises else nullcontext(),
            DistContext.launch(MeshConfig(replicate=2, shard=2), "cpu") as context,
        ):
            mesh = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
            rows = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate(), Shard(0)])
            assert (rows * 2).sum().full_tensor() == 56  # torch takes the sum's mesh from a cache
            context.add_domain("own", {"own": 4})
            counts.append(_threads())
            if raises:
                raise ArithmeticError
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


# Case 45 in processes of their own: neither torchrun nor the pool is there to clean up.
FAILING = """
    import torch, torch.distributed as dist
    from torch import nn
    from d9d.mesh import DistContext, MeshConfig

    class Broken(nn.Module):
        def forward(self, x):
            raise ArithmeticError("broken forward")

    def fail(where, context):
        if where == "forward":
            Broken()(torch.ones(1))
        elif where == "hook":
            x = torch.ones(1, requires_grad=True)
            x.register_post_accumulate_grad_hook(lambda _: 1 / 0)
            x.sum().backward()
        with context.main_process_first():
            raise OSError("nothing to prepare")

    with DistContext.launch(MeshConfig(replicate=-1), "cpu") as context:
        if context.rank == {rank}:
            fail({where!r}, context)
        dist.barrier()
        dist.barrier()
"""


@pytest.mark.parametrize(
    ("where", "rank", "cause"),
    [
        ("forward", 0, "ArithmeticError: broken forward"),
        ("hook", 1, "ZeroDivisionError"),
    ],
)
def test_an_exception_on_one_rank_ends_all_ranks_with_its_traceback(where, rank, cause):
    ranks = _start(2, FAILING.format(where=where, rank=rank))
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert all(process.returncode for process in ranks), outputs
    for output in outputs:
        assert cause in output
    assert f"leaves because rank {rank} failed" in "".join(outputs)


def _start(size: int, script: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=os.environ
            | {"RANK": str(r), "WORLD_SIZE": str(size), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(size)
    ]


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


LEAVING = """
    import sys, time
    import torch.distributed as dist
    from d9d.mesh import DistContext, MeshConfig

    with DistContext.launch(MeshConfig(replicate=-1), "cpu") as context:
        dist.barrier()
    with DistContext.launch(MeshConfig(replicate=-1), "cpu") as context:
        dist.barrier()
        time.sleep(1.5 * context.rank)
        print("leaves")
        sys.exit(0)
"""


def test_ranks_may_launch_again_and_leave_by_a_successful_exit():
    ranks = _start(2, LEAVING)
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert all("leaves" in output and "SystemExit" not in output for output in outputs)


def test_a_launch_that_fails_leaves_no_process_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def broken(self, name, dims):
        raise OSError("no mesh")

    monkeypatch.setattr(DistContext, "add_domain", broken)
    with pytest.raises(OSError, match="no mesh"):
        DistContext.launch(MeshConfig(), "cpu")
    assert not dist.is_initialized()
