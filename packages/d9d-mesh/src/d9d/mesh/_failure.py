"""One rank's exception ends every rank.

A rank that fails writes its traceback into the store of the job. Every rank watches that key from a thread of its
own, since its main thread may be stuck in a collective that will never finish, and leaves when it appears.
"""

import json
import os
import sys
import threading
import traceback

from torch.distributed import Store

_KEY = "failure"
_POLL_SECONDS = 0.5
# How long a failing rank that hosts the store stays, so that the others can read it.
_LINGER_SECONDS = 2.0


class FailureWatch:
    """Watches a job's store for another rank's failure and reports this rank's.

    Args:
        store: The store that all ranks share; a clone is used, since a store serves one thread.
        rank: This rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store.clone()
        self._rank = rank
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="d9d-failure-watch", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Make this rank's failure known. The process ends soon after, also if its own way out is blocked."""
        self.stop()
        text = "".join(traceback.format_exception(error))
        try:
            # The first failure is the cause; what follows in other ranks is its effect.
            first = self._store.compare_set(_KEY, "", json.dumps([self._rank, text]))
        except RuntimeError:
            return  # the store is gone, and with it the rank that hosted it: that rank has said why
        failed, cause = json.loads(first)
        if failed != self._rank:
            sys.stderr.write(f"rank {self._rank}: rank {failed} had failed before:\n{cause}")
        threading.Thread(target=_leave_later, name="d9d-failure-exit", daemon=True).start()
        self._done.clear()
        self._done.wait(_LINGER_SECONDS)

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            try:
                if not self._store.check([_KEY]):
                    continue
                rank, cause = json.loads(self._store.get(_KEY))
                sys.stderr.write(f"rank {self._rank} leaves because rank {rank} failed:\n{cause}")
            except RuntimeError as lost:
                # After the last barrier the rank that hosts the store may be gone before this one stops watching.
                if self._done.wait(_LINGER_SECONDS):
                    return
                sys.stderr.write(f"rank {self._rank} leaves because the store of the job is gone: {lost}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            # The main thread may never come back from its collective: no exception can reach it.
            os._exit(1)


def _leave_later() -> None:
    """End the process even if its main thread waits for ranks that are gone."""
    threading.Event().wait(2 * _LINGER_SECONDS)
    os._exit(1)
