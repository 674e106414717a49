"""The place of this process in a job: rank, device, and the meshes that everything else is laid out on."""

import itertools
import logging
import math
import os
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Self

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._config import MeshConfig
from ._domains import domain_shapes
from ._failure import FailureWatch
from ._objects import broadcast_object
from ._shared import forget_meshes, shared_mesh

_launches = itertools.count()
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@attrs.frozen(kw_only=True)
class Timeouts:
    """How long ranks wait for each other before that is an error."""

    launch: timedelta = timedelta(minutes=5)
    """For all ranks to appear."""

    collective: timedelta = timedelta(minutes=10)
    """For all ranks to join one collective."""


class DistContext:
    """Rank, device and meshes of one process; leave it as a context manager.

    Made by `launch`. Meshes are named domains over the same ranks, see `domain_shapes`; `add_domain` makes more.
    Leaving after an exception ends every rank of the job within seconds, each of them printing the traceback of
    the rank that failed first. ``sys.exit(0)`` is no failure.
    """

    def __init__(
        self, config: MeshConfig, device: torch.device, watch: FailureWatch | None, *, owns_group: bool
    ) -> None:
        self.config = config
        """Resolved degrees."""
        self.device = device
        """Where this rank computes."""
        self.rank = dist.get_rank()
        """Index in the job; 0 is the main rank."""
        self.world_size = dist.get_world_size()
        """Ranks in the job."""
        self.local_rank = _local_rank()
        """Index on this host."""
        self._watch = watch
        self._owns_group = owns_group
        self._meshes: dict[str, DeviceMesh] = {}
        # One fixed order on all ranks: a mesh that only some ranks build hangs.
        for name, dims in domain_shapes(config).items():
            self.add_domain(name, dims)

    @classmethod
    def launch(
        cls, config: MeshConfig, device_type: str | None = None, timeouts: Timeouts | None = None
    ) -> "DistContext":
        """Join the job that ``torchrun`` started, or be a world of one.

        A default process group that exists already is used, and is left as it is. The meshes stay with it: a later
        launch finds them, so that any number of launches of one shape has one set of process groups.

        Args:
            config: Degrees; at most one of them is -1.
            device_type: "cpu" or "cuda"; without it CUDA where there is any.
            timeouts: How long to wait for other ranks.

        Raises:
            ValueError: The degrees do not fit the number of ranks.
        """
        timeouts = timeouts or Timeouts()
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        config = config.resolve(_world_size())
        device = torch.device(device_type)
        if device_type == "cuda":
            device = torch.device("cuda", _local_rank())
            torch.cuda.set_device(device)
        if dist.is_initialized():
            return cls(config, device, None, owns_group=False)
        watch = _join(device, timeouts)
        try:
            return cls(config, device, watch, owns_group=True)
        except BaseException as error:
            if watch:
                watch.report(error)
            else:
                _leave()
            raise

    def mesh(self, domain: str = "dense") -> DeviceMesh:
        """The mesh of a domain: "dense", "batch", "expert", "world" or one that was added.

        Raises:
            KeyError: There is no such domain.
        """
        if domain not in self._meshes:
            raise KeyError(f"there is no domain {domain!r}: there are {', '.join(self._meshes)}")
        return self._meshes[domain]

    def add_domain(self, name: str, dims: Mapping[str, int]) -> DeviceMesh:
        """Lay the ranks out in one more way; every rank must call this, in the same order.

        Domains of equal dims share one mesh, and its process groups.

        Args:
            name: Under which `mesh` finds it.
            dims: Name and size of each mesh dim, slowest first; the sizes multiply to the world size.

        Raises:
            ValueError: The name is taken, or the sizes do not fit.
        """
        if name in self._meshes:
            raise ValueError(f"domain {name!r} exists already")
        if (size := math.prod(dims.values())) != self.world_size:
            raise ValueError(f"domain {name!r} of {dict(dims)} takes {size} ranks, and there are {self.world_size}")
        self._meshes[name] = shared_mesh(self.device.type, dims)
        return self._meshes[name]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Run the body on rank 0 to its end, then on all other ranks at once.

        Raises:
            RuntimeError: On the other ranks, with rank 0's traceback, when the body failed there.
        """
        if not self.is_main:
            if failure := broadcast_object(""):
                raise RuntimeError(f"rank 0 failed in main_process_first:\n{failure}")
            yield
            return
        try:
            yield
        except BaseException:
            broadcast_object(traceback.format_exc())
            raise
        broadcast_object("")

    def configure_logging(self, level: int = logging.INFO, *, other_ranks: int = logging.WARNING) -> None:
        """Send the root logger to standard error, each line under its rank.

        Args:
            level: What rank 0 shows.
            other_ranks: What the others show.
        """
        logging.basicConfig(
            level=level if self.is_main else other_ranks,
            format=f"%(asctime)s rank {self.rank}/{self.world_size} %(levelname)s %(name)s: %(message)s",
            force=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._owns_group:
            return
        if error is not None and self._watch and not _is_success(error):
            # Its groups stay: taking them down may wait for ranks that are elsewhere.
            self._watch.report(error)
            return
        if self._watch:
            # A rank that leaves early can abort the collective of another.
            dist.barrier()
            self._watch.stop()
        _leave()


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in {None, 0}


def _join(device: torch.device, timeouts: Timeouts) -> FailureWatch | None:
    """Make the default process group, and a watch over the other ranks if there are any."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not _under_launcher():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeouts.collective)
        return None
    store, rank, size = _rendezvous(tuple(map(os.environ.get, _RENDEZVOUS)), timeouts.launch)
    launch = next(_launches)
    # torch numbers the groups of the next launch from 0 again.
    store = dist.PrefixStore(f"d9d/{launch}", store)
    # Groups of a bound device are split from the default one, which scales; but torch crashes at a split unless the
    # default group holds the process's first NCCL communicator (pytorch#192109). Later launches make groups anew.
    is_bound = device.type == "cuda" and launch == 0
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeouts.collective,
        device_id=device if is_bound else None,
    )
    return FailureWatch(store, rank) if size > 1 else None


def _leave() -> None:
    dist.destroy_process_group()
    forget_meshes()


@cache
def _rendezvous(place: tuple[str | None, ...], timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The job's store, this rank and the number of ranks; one store for all launches in one place.

    Where no launcher keeps the store, rank 0 does: it would take one down while others look for the next there.
    """
    del place
    found: tuple[dist.Store, int, int] = next(dist.rendezvous("env://", timeout=timeout))
    return found


def _under_launcher() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if _under_launcher() else 1


def _local_rank() -> int:
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    # A launcher that does not say it numbers ranks host by host, one a GPU.
    return rank % torch.cuda.device_count() if torch.cuda.is_available() else rank
