"""Reading what many tensors need, by a few threads, within a budget of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from threading import local

import attrs
import torch
from torch import Tensor

from ._extent import Extent
from ._hands import PIECE, Fill, Hands

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all, by the thread that called us."""

MEMORY_BUDGET = 32 << 20
"""Bytes of buffers at once. With those that threads stage in, at most 64 MiB beyond the largest group."""
_MAX_QUEUED = 64


def count_threads() -> int:
    """As many as keep two busy with copying while others wait for a disk; their buffers stay below 16 MiB."""
    return min(4, 2 * len(os.sched_getaffinity(0)))


@attrs.frozen
class Batch:
    """Reads that belong together, and what is done with what they have read."""

    nbytes: int
    """How much there is to read."""
    held: int
    """Bytes of memory from the start to the end, beyond that of the tensors to be filled."""
    start: Callable[[], Iterable[Fill]]
    """Makes the buffers, and says what is read into which."""
    finish: Callable[[], None] | None = None
    """Called when all of it is there."""
    alone: bool = False
    """Whether earlier ones must have ended first, as it writes where they write."""


def run_batches(
    batches: Sequence[Batch], *, memory_budget: int = MEMORY_BUDGET, progress: Progress | None = None
) -> None:
    """Reads all batches; those that are started together hold `memory_budget` at most, or there is only one.

    `start`, `finish` and `progress` are called by this thread, reads are made by others. When anything raises, what
    is queued is dropped, what is being read ends, and the first error is raised.

    Raises:
        ReadError: A file cannot be read.
        ChecksumError: A block is damaged.
    """
    if memory_budget < 0:
        raise ValueError(f"memory_budget must not be negative, got {memory_budget!r}")
    with _reading() as pool:
        run = _Run(pool, memory_budget, sum(batch.nbytes for batch in batches), progress)
        for number, batch in enumerate(batches):
            run.add(number, batch)
        run.end()


class _Run:
    """Batches on their way."""

    def __init__(self, pool: _Pool, memory_budget: int, total: int, progress: Progress | None) -> None:
        self._pool = pool
        self._budget = memory_budget
        self._total = total
        self._progress = progress
        self._read = 0
        self._held = 0
        self._started: dict[int, tuple[Batch, int]] = {}  # by number, with the reads that are left
        self._tell()

    def add(self, number: int, batch: Batch) -> None:
        """Starts a batch, as soon as there is memory for it."""
        while self._started and (batch.alone or self._held + batch.held > self._budget):
            self._wait()
        self._held += batch.held
        wanted = list(batch.start())
        self._read += batch.nbytes - sum(fill.extent.nbytes for fill in wanted)  # those that were read by `start`
        fills = list(_pieces(wanted))
        self._started[number] = batch, len(fills)
        for fill in fills:
            while self._pool.queued >= _MAX_QUEUED:
                self._wait()
            self._pool.put(number, fill)
        if not fills:
            self._finish(number)
            self._tell()

    def end(self) -> None:
        """Waits for all that are left."""
        while self._started:
            self._wait()

    def _wait(self) -> None:
        """Until one more read has ended."""
        number, nbytes = self._pool.ended()
        self._read += nbytes
        batch, left = self._started[number]
        self._started[number] = batch, left - 1
        if left == 1:
            self._finish(number)
        self._tell()

    def _finish(self, number: int) -> None:
        batch, _ = self._started.pop(number)
        if batch.finish is not None:
            batch.finish()
        self._held -= batch.held

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._read, self._total)


def _pieces(fills: Iterable[Fill]) -> Iterator[Fill]:
    """Without those of nothing; in pieces, but for what has a checksum of the whole."""
    for fill in fills:
        extent, into = fill.extent, fill.into
        if extent.nbytes == 0:
            continue
        if extent.block.check is not None or extent.nbytes <= PIECE:
            yield fill
            continue
        for part in extent.cut(PIECE):
            yield Fill(Extent(extent.block, part, extent.index), into[part.within(extent.part)])


class _Own(local):
    """What each thread has for itself."""

    hands: Hands | None = None


class _Pool:
    """Threads with their hands, and a queue of what has ended."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._ended = SimpleQueue[tuple[int, int, Future[None]]]()
        self._own = _Own()
        self.hands: list[Hands] = []
        self.queued = 0

    def put(self, number: int, fill: Fill) -> None:
        """Has it read by one of the threads."""
        self.queued += 1
        future = self._executor.submit(self._fill, fill)
        future.add_done_callback(lambda future: self._ended.put((number, fill.extent.nbytes, future)))

    def ended(self) -> tuple[int, int]:
        """Number and bytes of the next that has ended; raises what it raised."""
        number, nbytes, future = self._ended.get()
        self.queued -= 1
        future.result()
        return number, nbytes

    def _fill(self, fill: Fill) -> None:
        hands = self._own.hands
        if hands is None:
            hands = self._own.hands = Hands()
            self.hands.append(hands)
        if fill.extent.block.check is None:
            hands.fill(fill)
        else:
            hands.fill_checked(fill)


@contextmanager
def _reading() -> Generator[_Pool]:
    with ThreadPoolExecutor(count_threads(), "d9d-ckpt-read") as executor:
        pool = _Pool(executor)
        try:
            yield pool
        finally:
            executor.shutdown(cancel_futures=True)
            for hands in pool.hands:
                hands.close()


def read_now(fills: Iterable[Fill]) -> None:
    """Reads by this thread."""
    hands = Hands()
    try:
        for fill in fills:
            for piece in _pieces([fill]):
                hands.fill(piece) if piece.extent.block.check is None else hands.fill_checked(piece)
    finally:
        hands.close()


def settle(tensors: Iterable[Tensor]) -> None:
    """Waits for what the GPU still does with tensors, which are about to be written on other streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
