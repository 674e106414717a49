"""The result of a collective that is under way."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.distributed import Work

T_co = TypeVar("T_co", covariant=True)


class Pending(Generic[T_co]):
    """What an ``…_async`` collective returns: `wait` gives what its synchronous twin would have returned.

    Every rank has to wait, in any order. Until then this keeps alive what travels; what the collective was called
    with may be overwritten or freed as soon as the call has returned.

    Args:
        work: Of torch.
        result: Makes the result once the work is done.
        sent: Buffer that has to stay until then.
    """

    def __init__(self, work: Work, result: Callable[[], T_co], *, sent: Tensor) -> None:
        self._work: Work | None = work
        self._sent: Tensor | None = sent
        self._make = result
        self._result: T_co

    def wait(self) -> T_co:
        """Wait for the result; again, for the same one.

        On CUDA it is there for what the current stream does next, and the host does not wait for tensors.

        Raises:
            RuntimeError: The collective failed, as torch says it.
        """
        if self._work is not None:
            self._work.wait()
            self._result = self._make()
            self._work = self._sent = None
        return self._result
