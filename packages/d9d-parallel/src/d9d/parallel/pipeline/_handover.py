"""Tensors on their way from one stage to another."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T", bound=Tensor | None)
T_co = TypeVar("T_co", bound=Tensor | None, covariant=True)


class Arrival(Protocol[T_co]):
    """Tensors that are there when they are taken."""

    def take(self) -> Sequence[T_co]:
        """The tensors, for what is computed next."""


class Handed(Generic[T]):
    """Tensors from another stage of this rank; nothing is copied.

    Args:
        tensors: As they are to be read.
    """

    def __init__(self, tensors: Sequence[T]) -> None:
        self._tensors = tensors
        self._versions = list(map(_version, tensors))

    def take(self) -> Sequence[T]:
        """The tensors.

        Raises:
            RuntimeError: One was overwritten before it was read.
        """
        if self._versions != list(map(_version, self._tensors)):
            raise RuntimeError(
                "what the stage before returned was overwritten before this stage read it: return a tensor that the "
                "next microbatch does not write to"
            )
        return self._tensors


def _version(tensor: Tensor | None) -> int:
    # The counter is what autograd itself goes by; there is no public way to it.
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001
