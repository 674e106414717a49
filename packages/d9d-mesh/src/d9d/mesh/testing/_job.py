"""A job of fresh processes, as a launcher starts one: for what a warm world cannot show, such as how ranks end."""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs
import torch

from ._pool import context_of_forks, task_of
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


class Job:
    """Ranks that have been started, see `start_job`."""

    def __init__(self, processes: Sequence[BaseProcess], outputs: Sequence[Path], name: str) -> None:
        self._processes, self._outputs, self._name = processes, outputs, name

    def output(self) -> str:
        """What all ranks have written so far."""
        return "\n".join(f"rank {rank}:\n{output.read_text()}" for rank, output in enumerate(self._outputs))

    def is_running(self) -> bool:
        """Whether no rank has ended."""
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """SIGKILL to every rank, wherever it is."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait(self, timeout: float) -> list[Ended]:
        """How each rank ended, by rank, once all have.

        Args:
            timeout: Seconds after which the job is killed.

        Raises:
            JobTimeoutError: A rank was still running then.
        """
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if running := [rank for rank, process in enumerate(self._processes) if process.is_alive()]:
            raise JobTimeoutError(f"ranks {running} of {self._name} did not end in {timeout} s\n{self.output()}")
        return [Ended(process.exitcode or 0, path.read_text()) for process, path in zip(self._processes, self._outputs)]


def run_job(size: int, function: Callable[..., object], *args: Any, timeout: float = 300.0) -> list[Ended]:
    """Run a function as `start_job` does until all ranks have ended.

    Args:
        size: As there.
        function: As there.
        *args: As there.
        timeout: Seconds after which the job is killed.

    Returns:
        How each rank ended, by rank.

    Raises:
        JobTimeoutError: A rank was still running after ``timeout``.
    """
    with start_job(size, function, *args) as job:
        return job.wait(timeout)


@contextmanager
def start_job(size: int, function: Callable[..., object], *args: Any) -> Generator[Job]:
    """Start a function in fresh processes that have the environment of a launcher, one a rank.

    Nothing is initialized there, and nothing ends a rank from outside until the block is left, which kills those that
    are left: a failure is the job's own business. The processes are forks of the server that `run_world` uses, so they
    start in milliseconds, with torch imported.

    Args:
        size: Number of ranks.
        function: Defined at the top of an importable file.
        *args: What the function gets, on every rank; picklable.
    """
    context = context_of_forks()
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
        for process in processes:
            process.start()
        job = Job(processes, outputs, task.function.name)
        try:
            yield job
        finally:
            job.kill()


def _rank(task: Task, rank: int, size: int, port: int, output: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Path(output).open("w") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    torch.set_num_threads(1)
    call(task)
