"""Schedules as choices in a config, a union that a third party can join."""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import attrs

from ._program import Program


@attrs.frozen(kw_only=True)
class Schedule(abc.ABC):
    """A way to order the computations of a pipeline; its settings are its fields.

    An attrs class below it that sets ``kind`` is known by that name as soon as its module is imported::

        @attrs.frozen(kw_only=True)
        class Staircase(Schedule):
            kind: ClassVar[str] = "staircase"
            stages_per_rank: int = 1

            def program(self, *, ranks: int, microbatches: int) -> Program: ...
    """

    kind: ClassVar[str]
    """Its name in configs and on the command line."""

    _members: ClassVar[dict[str, "type[Schedule]"]] = {}

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        """Enter a new schedule.

        Raises:
            ValueError: If another one has the same ``kind``.
        """
        if "kind" not in cls.__dict__:
            return
        taken = cls._members.setdefault(cls.kind, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} has kind={cls.kind!r}, which "
                f"{taken.__module__}.{taken.__qualname__} has already; give it another one"
            )
        cls._members[cls.kind] = cls

    @staticmethod
    def kinds() -> Mapping[str, "type[Schedule]"]:
        """All schedules, by ``kind``."""
        return MappingProxyType(Schedule._members)

    @property
    @abc.abstractmethod
    def stages_per_rank(self) -> int:
        """How many stages each rank holds; a field where one may choose."""

    @abc.abstractmethod
    def program(self, *, ranks: int, microbatches: int) -> Program:
        """The order of F, B, I and W on each rank, for `derive` to complete.

        Raises:
            ValueError: If the schedule does not exist for these counts; says which nearest ones it supports.
        """
