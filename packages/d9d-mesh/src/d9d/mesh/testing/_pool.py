"""Worlds of worker processes that stay warm between tests.

A fresh process that imports torch takes seconds; a fork of a server that has imported it takes milliseconds. So
workers come from multiprocessing's forkserver, and a world stays for the next test of its size.
"""

import atexit
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore

from ._reference import Reference
from ._worker import Outcome, Task, serve

T = TypeVar("T")

# Slicing a mesh imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = [serve.__module__, "torch.distributed.tensor", "torch._dynamo"]

_START_SECONDS = 300.0
_worlds: dict[int, "_World"] = {}


class WorldError(RuntimeError):
    """A rank raised.

    Attributes:
        rank: The rank that raised first.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class WorldTimeoutError(TimeoutError):
    """A world did not finish in time; the message holds the stack of each rank that was still running."""


def run_world(size: int, function: Callable[..., T], *args: Any, timeout: float = 300.0) -> list[T]:
    """Run a function on every rank of a gloo world on this machine.

    The default process group is initialized there, with one thread a rank; ``torch.manual_seed(0)`` was called.
    Put all cases of one size into one call: a world costs, a case does not.

    Args:
        size: Number of ranks.
        function: Defined at the top of an importable file; it is found there again by its qualified name.
        *args: What the function gets, on every rank; picklable.
        timeout: Seconds after which the world is killed.

    Returns:
        What each rank returned, by rank.

    Raises:
        WorldError: A rank raised; its traceback is in the message. The other ranks are killed.
        WorldTimeoutError: The world was still running after ``timeout``, and was killed.
    """
    world = _worlds.pop(size, None)
    if world is None or not world.is_alive():
        world = _World(size)
    try:
        results: list[T] = world.run(task_of(function, args), timeout)
    except BaseException:
        # Its ranks may be anywhere: the next test gets a new one.
        world.kill()
        raise
    _worlds[size] = world
    return results


def stop_worlds() -> None:
    """End the workers of all worlds."""
    while _worlds:
        _worlds.popitem()[1].kill()


atexit.register(stop_worlds)


def context_of_forks() -> ForkServerContext:
    """Starts forks of a server that has imported torch, and what tests import if this process has when it starts."""
    context = multiprocessing.get_context("forkserver")
    used = [name for name in list(sys.modules) if re.fullmatch(r"d9d\.\w+|pytest|hypothesis", name)]
    context.set_forkserver_preload([*_PRELOAD, *used])
    return context


def task_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Task:
    return Task(Reference.to(function, role="what ranks are to run"), pickle.dumps(args))


class _World:
    def __init__(self, size: int) -> None:
        context = context_of_forks()
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="d9d-world-")
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, rank, size, self._store.port, str(self._stack_file(rank))),
                name=f"d9d-world-{size}-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            self._collect("start", _START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def run(self, task: Task, timeout: float) -> list[Any]:
        message = pickle.dumps(task)
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(task.function.name, timeout)

    def is_alive(self) -> bool:
        """Whether every worker is there to take a task."""
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections):
            process.join()
            connection.close()
        self._stacks.cleanup()

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """One outcome of every rank; the first failure ends the wait."""
        size = len(self._connections)
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < size:
            pending = [c for r, c in enumerate(self._connections) if r not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorldTimeoutError(self._report_stuck(what, timeout, set(range(size)) - results.keys()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                results[rank] = self._receive(connection, rank, what)
        return [results[rank] for rank in range(size)]

    def _receive(self, connection: Connection, rank: int, what: str) -> Any:
        where = f"rank {rank} of {len(self._connections)} in {what}"
        try:
            outcome: Outcome = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own worker
        except EOFError:
            self._processes[rank].join()
            raise WorldError(f"{where} died with exit code {self._processes[rank].exitcode}", rank) from None
        if outcome.traceback is not None:
            raise WorldError(f"{where} raised:\n{outcome.traceback}", rank)
        return pickle.loads(outcome.value)  # noqa: S301

    def _report_stuck(self, what: str, timeout: float, ranks: set[int]) -> str:
        for rank in ranks:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3)  # for the handlers to write
        stacks = [f"rank {rank}:\n{self._stack_file(rank).read_text()}" for rank in sorted(ranks)]
        return "\n".join([f"{what} did not finish on ranks {sorted(ranks)} in {timeout} s", *stacks])

    def _stack_file(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"{rank}.txt"
