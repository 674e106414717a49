"""A job of fresh processes, as a launcher starts one: for what a warm world cannot show, such as how ranks end."""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from ._pool import PRELOAD, task_of
from ._worker import Task, call


@attrs.frozen
class Ended:
    """How one rank ended."""

    exit_code: int
    """0, that of `sys.exit`, 1 after an exception; negative for a signal."""

    output: str
    """What it wrote to standard output and standard error."""


class JobTimeoutError(TimeoutError):
    """A job did not end in time, and was killed; the message holds what its ranks wrote."""


def run_job(size: int, function: Callable[..., object], *args: Any, timeout: float = 300.0) -> list[Ended]:
    """Run a function in fresh processes that have the environment of a launcher, one a rank, until all have ended.

    Nothing is initialized there, and nothing ends a rank from outside: a failure is the job's own business. The
    processes are forks of the server that `run_world` uses, so they start in milliseconds, with torch imported.

    Args:
        size: Number of ranks.
        function: Defined at the top of an importable file.
        *args: What the function gets, on every rank; picklable.
        timeout: Seconds after which the job is killed.

    Returns:
        How each rank ended, by rank.

    Raises:
        JobTimeoutError: A rank was still running after ``timeout``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="d9d-job-") as directory:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        outputs = [Path(directory) / f"{rank}.txt" for rank in range(size)]
        for output in outputs:
            output.touch()
        task = task_of(function, args)
        processes = [
            context.Process(target=_rank, args=(task, rank, size, port, str(output)), daemon=True)
            for rank, output in enumerate(outputs)
        ]
        probe.close()
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            if running := [rank for rank, process in enumerate(processes) if process.is_alive()]:
                written = "\n".join(f"rank {rank}:\n{output.read_text()}" for rank, output in enumerate(outputs))
                raise JobTimeoutError(f"ranks {running} of {task.function.name} did not end in {timeout} s\n{written}")
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [Ended(process.exitcode or 0, output.read_text()) for process, output in zip(processes, outputs)]


def _rank(task: Task, rank: int, size: int, port: int, output: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Path(output).open("w") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    torch.set_num_threads(1)
    call(task)
