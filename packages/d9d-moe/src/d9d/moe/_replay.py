"""Routing that was recorded, and is taken again.

Reinforcement learning trains on the experts that the rollout used; a bench repeats the same load.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import attrs
from torch import Tensor, nn

from ._count import is_recomputing
from ._load import routers
from ._router import Tape

Record = dict[str, list[Tensor]]
"""For each router by name the expert ids (T, K), int64, of its forwards in their order."""


@contextmanager
def record_routing(module: nn.Module) -> Generator[Record]:
    """Record what the routers within a module choose; recompute is not recorded again.

    Yields:
        The record, which grows while the context is open. Padding has ids too; they mean nothing.
    """
    record: Record = {name: [] for name, _ in routers(module)}
    with _taped(module, {name: _Recorder(ids) for name, ids in record.items()}):
        yield record


@contextmanager
def replay_routing(module: nn.Module, record: Mapping[str, Sequence[Tensor]]) -> Generator[None]:
    """Let the routers within a module take recorded experts; how these are weighed is computed anew, with gradient.

    With activation checkpointing the backward pass is to run within the context too, and there is to be one forward of
    each router in it, since a recompute does not tell which forward it repeats.

    Args:
        module: As it was recorded, or a part of it that keeps the names.
        record: As ``record_routing`` gives it, or from elsewhere.

    Raises:
        ValueError: A router has no record, or its shape is not that of the tokens.
        RuntimeError: There are more forwards than were recorded, or a recompute of one of several.
    """
    names = [name for name, _ in routers(module)]
    if missing := [name for name in names if name not in record]:
        raise ValueError(f"no routing is recorded for {missing!r}, only for {sorted(record)!r}; record the same module")
    with _taped(module, {name: _Player(name, record[name]) for name in names}):
        yield


@contextmanager
def _taped(module: nn.Module, tapes: Mapping[str, Tape]) -> Generator[None]:
    before = [(router, router.tape) for _, router in routers(module)]
    for name, router in routers(module):
        router.tape = tapes[name]
    try:
        yield
    finally:
        for router, tape in before:
            router.tape = tape


@attrs.frozen
class _Recorder:
    """Keeps what a router chooses."""

    ids: list[Tensor]

    def __call__(self, ids_TK: Tensor) -> Tensor:
        if not is_recomputing():
            self.ids.append(ids_TK)
        return ids_TK


@attrs.define
class _Player:
    """Gives a router what was recorded."""

    name: str
    ids: Sequence[Tensor]
    _played: int = 0

    def __call__(self, ids_TK: Tensor) -> Tensor:  # noqa: ARG002 - what the router would choose
        if is_recomputing():
            if self._played != 1:
                raise RuntimeError(
                    f"{self.name!r} recomputes one of {self._played} forwards of one replay_routing, which one is not "
                    "known; open a replay_routing for each microbatch, around its forward and backward"
                )
            return self.ids[0]
        if self._played == len(self.ids):
            raise RuntimeError(f"{self.name!r} runs more often than the {self._played} times that were recorded")
        self._played += 1
        return self.ids[self._played - 1]
