"""Scripts on CUDA ranks; what a rank is told is seen without a GPU too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from d9d.mesh.testing import gpu_rank, run_on_gpus


@pytest.mark.parametrize(
    ("gpus", "seen"),
    [("2", [("0", "rank0"), ("1", "rank1"), ("0", "rank2")]), ("3", [("0", None), ("1", None), ("2", None)])],
)
def test_ranks_share_gpus_as_if_each_had_a_host_of_its_own(monkeypatch, tmp_path, gpus, seen):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, beside\nbeside.told.append((sys.argv, __name__, dict(os.environ)))\n")
    (tmp_path / "beside.py").write_text("told = []\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    for rank, expected in enumerate(seen):
        environment = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"}
        monkeypatch.setattr(os, "environ", environment)
        gpu_rank.main(gpus, str(script), "--flag", "value")
        *how, found = sys.modules["beside"].told[-1]
        assert how == [[str(script), "--flag", "value"], "__main__"]
        assert (found["LOCAL_RANK"], found.get("NCCL_HOSTID")) == expected
    del sys.modules["beside"]


def test_no_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="no GPU to run script.py on"):
        run_on_gpus("script.py", ranks=2)


@pytest.mark.gpu
def test_two_ranks_on_nccl_whatever_the_number_of_gpus():
    run_on_gpus(__file__, ranks=2)
    with pytest.raises(subprocess.CalledProcessError):
        run_on_gpus(Path(__file__).with_name("no_such_script.py"), ranks=1)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    total = torch.ones(3, device="cuda") + dist.get_rank()
    dist.all_reduce(total)
    assert total.tolist() == [3.0, 3.0, 3.0]
    dist.destroy_process_group()
