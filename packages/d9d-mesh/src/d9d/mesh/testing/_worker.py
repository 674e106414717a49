"""What a worker process of a test world does."""

import faulthandler
import gc
import itertools
import pickle
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from .._shared import forget_meshes
from ._reference import Reference


@attrs.frozen
class Task:
    """A function by where it is defined: a test module that pytest imported cannot be unpickled by name."""

    function: Reference
    arguments: bytes


@attrs.frozen
class Outcome:
    """A pickled result, or the traceback of what was raised."""

    value: bytes = b""
    traceback: str | None = None


def serve(connection: Connection, rank: int, size: int, port: int, stack_file: str) -> None:
    """Join the world, then run tasks until the connection closes."""
    with Path(stack_file).open("w") as stacks:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        gc.freeze()  # torch stays, so that no collection after a task goes through all of its objects
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        connection.send_bytes(pickle.dumps(Outcome(pickle.dumps(None))))
        for number in itertools.count():
            try:
                task: Task = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the test's own process
            except EOFError:
                return
            # Groups of its own for each task: gloo has threads for every group, and those of old tests would pile up.
            groups = dist.PrefixStore(str(number), store)
            dist.init_process_group("gloo", store=groups, rank=rank, world_size=size, timeout=timedelta(minutes=10))
            outcome = _outcome(task)
            if outcome.traceback is None:
                dist.barrier()  # a rank that leaves early can abort the collective of another
                dist.destroy_process_group()
                forget_meshes()
                gc.collect()
            connection.send_bytes(pickle.dumps(outcome))


def _outcome(task: Task) -> Outcome:
    try:
        torch.manual_seed(0)
        return Outcome(pickle.dumps(call(task)))
    except BaseException:  # noqa: BLE001 - the test decides
        return Outcome(traceback=traceback.format_exc())


def call(task: Task) -> Any:
    """Run a task."""
    function = task.function.resolve()
    return function(*pickle.loads(task.arguments))  # noqa: S301 - from the test's own process
