"""The main module of a rank that `run_on_gpus` starts: the number of GPUs, then a script and its arguments."""

import os
import runpy
import sys
from pathlib import Path


def main(gpus: str, script: str, *arguments: str) -> None:
    """Run the script on this rank's GPU."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks > int(gpus):
        # NCCL takes several ranks on a GPU only if they are of several hosts, which talk over sockets.
        os.environ |= {"LOCAL_RANK": str(rank % int(gpus)), "NCCL_HOSTID": f"rank{rank}"}
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
