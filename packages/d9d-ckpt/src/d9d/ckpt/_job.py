"""Job checkpoints: saved so that a kill at any moment loses nothing."""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

import attrs
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import all_gather, rank_of, together
from ._job_read import JobCheckpoint
from ._job_write import write_job_checkpoint
from ._json import JSON
from ._manifest import Manifest, UnknownFormatError
from ._publish import PARTIAL

UNFINISHED = f".step-*{PARTIAL}"
log = logging.getLogger("d9d.ckpt")


@attrs.frozen(order=True)
class _Saved:
    """A directory of a checkpoint: `step-00000010`, or `step-00000010.2` where the first try turned out broken."""

    step: int
    attempt: int

    @classmethod
    def parse(cls, name: str) -> _Saved | None:
        found = re.fullmatch(r"step-([0-9]{8,})(?:\.([0-9]+))?", name)
        return None if found is None else cls(int(found[1]), int(found[2] or 1))

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt > 1 else "")


class JobCheckpoints:
    """The checkpoints of a job in a directory, of which the last few are kept.

    Args:
        root: The directory, on a file system that all ranks see.
        group: The ranks that save and load together; by default all.
        keep: How many complete checkpoints stay.
    """

    def __init__(self, root: str | PathLike[str], *, group: ProcessGroup | None = None, keep: int = 2) -> None:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be a whole number of at least 1, got {keep!r}")
        self._root = Path(root)
        self._group = group
        self._keep = keep

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        shared: Mapping[str, JSON],
        per_rank: Mapping[str, Tensor | JSON],
    ) -> None:
        """Saves the state after `step`. Collective.

        It is complete when this returns; after an error or a kill at any moment the earlier ones are as they were.
        Once it is complete, older ones beyond `keep` and broken ones up to its step are removed.

        Args:
            step: Counts the checkpoints; saved again, a step replaces what is there of it.
            tensors: Tensors or DTensors by global name. Ranks may have different names; each element is written once.
                A plain tensor that several ranks have is taken to be equal on them.
            shared: Other state that is the same on all ranks: what JSON gives back as it is. Rank 0's is written.
            per_rank: This rank's own state: plain tensors, or what JSON gives back as it is.

        Raises:
            TypeError: A value that JSON would not give back as it is, or names that are no strings.
            ValueError: The ranks' tensors do not fit together, or the step is no whole number.
            PeerError: Another rank failed.
        """
        with together(self._group):
            if type(step) is not int or not 0 <= step < 2**63:  # type(), as True is an int
                raise ValueError(f"step must be a whole number from 0 to 2**63 - 1, got {step!r}")
            attempts = [saved.attempt for saved in self._scan() if saved.step == step]
        attempt = max(all_gather(max(attempts, default=0), self._group)) + 1
        saved = _Saved(step, attempt)
        directory = self._root / saved.name
        write_job_checkpoint(directory, step, tensors, shared=shared, per_rank=per_rank, group=self._group)
        with together(self._group):
            if rank_of(self._group) == 0:
                self._prune(saved)

    def latest(self) -> JobCheckpoint | None:
        """The last complete checkpoint, None if there is none. Collective.

        Broken and unfinished ones are skipped with a warning. Complete means: the manifest can be read, and all files
        are there with their sizes; checksums are compared when data is loaded.

        Raises:
            UnknownFormatError: The last one was written by a version that this one does not know.
            ValueError: There are checkpoints, and all are broken. No kill does that, as a save never replaces the last
                complete one; a run that took it for a fresh start would overwrite what may be repaired.
        """
        names: list[str] = []
        with together(self._group):
            if rank_of(self._group) == 0:
                for path in self._root.glob(UNFINISHED):
                    log.warning("skipping the unfinished checkpoint %s", path)
                names = [saved.name for saved in itertools.islice(self._complete(), 1)]
                if not names and (broken := [saved.name for saved in self._scan()]):
                    raise ValueError(
                        f"no checkpoint in {str(self._root)!r} is complete, the log says what each lacks: {broken}; "
                        "put back the missing files, or move these directories away to start anew"
                    )
        chosen = all_gather(names, self._group)[0]
        if not chosen:
            return None
        with together(self._group):
            return JobCheckpoint(self._root / chosen[0], group=self._group)

    def _scan(self) -> list[_Saved]:
        """What lies in the directory, last first; a file of such a name is not ours."""
        try:
            names = [path.name for path in self._root.iterdir() if path.is_dir()]
        except FileNotFoundError:
            names = []
        return sorted((saved for saved in map(_Saved.parse, names) if saved is not None), reverse=True)

    def _complete(self) -> Iterator[_Saved]:
        """The complete ones, last first; says which ones it skips."""
        for saved in self._scan():
            try:
                Manifest.read(self._root / saved.name)
            except (ValueError, OSError) as error:
                log.warning("skipping the broken checkpoint %s: %s", self._root / saved.name, error)
                continue
            yield saved

    def _prune(self, last: _Saved) -> None:
        """Removes what `last`, if it is complete, makes superfluous; what a later version wrote stays."""
        last_try: dict[int, _Saved] = {}
        superfluous: list[_Saved] = []
        for saved in self._scan():
            if saved.step > last.step:
                continue
            try:
                Manifest.read(self._root / saved.name)
            except UnknownFormatError:
                continue
            except (ValueError, OSError):
                if saved == last:
                    raise
                superfluous.append(saved)
                continue
            if saved.step in last_try or len(last_try) == self._keep:
                superfluous.append(saved)
            else:
                last_try[saved.step] = saved
        self._remove_unfinished()
        for saved in superfluous:
            # a name of its own first: a kill halfway leaves no broken checkpoint
            (self._root / saved.name).rename(self._root / f".{saved.name}{PARTIAL}")
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        for path in self._root.glob(UNFINISHED):
            shutil.rmtree(path)
