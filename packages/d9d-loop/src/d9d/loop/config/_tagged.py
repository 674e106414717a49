"""Tagged unions by structure, so that packages that cannot import `Choice` have them too."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable


@runtime_checkable
class TaggedUnion(Protocol):
    """A union and all of its members."""

    @classmethod
    def kinds(cls) -> Mapping[str, type[Any]]:
        """The members, by ``kind``."""


def kind_of(cls: Any) -> str | None:
    """The kind of a member; None for a union itself and for every other class."""
    if not isinstance(cls, type) or not issubclass(cls, TaggedUnion):
        return None
    return next((kind for kind, member in cls.kinds().items() if member is cls), None)


def is_union_root(cls: Any) -> TypeGuard[type[TaggedUnion]]:
    """Whether a field of this type is filled by the member that its ``kind`` names."""
    return isinstance(cls, type) and issubclass(cls, TaggedUnion) and kind_of(cls) is None
