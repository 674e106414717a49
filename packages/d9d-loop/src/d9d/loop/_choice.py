"""Tagged unions of config classes that a third party can join."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self


class Choice:
    """Base of a tagged union of attrs classes: a choice in a config file, made by its ``kind``.

    A direct subclass is a union; an attrs class below it that sets ``kind`` is a member, known as soon as its module
    is imported::

        @attrs.frozen(kw_only=True)
        class Schedule(Choice): ...

        @attrs.frozen(kw_only=True)
        class Staircase(Schedule):
            kind: ClassVar[str] = "staircase"
    """

    __slots__ = ()

    kind: ClassVar[str]
    """Tag of a member; a union itself has none."""

    _members: ClassVar[dict[str, type[Any]]]

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        """Open a registry for a new union; enter a new member.

        Raises:
            ValueError: If another class of this union has the same ``kind``.
        """
        if Choice in cls.__bases__:
            cls._members = {}
        if "kind" not in cls.__dict__:
            return
        taken = cls._members.setdefault(cls.kind, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} has kind={cls.kind!r}, which "
                f"{taken.__module__}.{taken.__qualname__} has already; give it another one"
            )
        cls._members[cls.kind] = cls

    @classmethod
    def kinds(cls) -> Mapping[str, type[Self]]:
        """The members of the union, by ``kind``."""
        return MappingProxyType(cls._members)
