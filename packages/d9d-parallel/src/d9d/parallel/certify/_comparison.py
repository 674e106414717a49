"""One number of a layout against that of one process."""

import enum
import math

import attrs
import torch
from torch import Tensor


class Quantity(enum.Enum):
    """What is compared, in the order in which one mistake causes the next."""

    INITIAL = "initial weight"
    TIE = "tie"
    SHARE = "share"
    WEIGHT = "weight"
    LOSS = "loss"
    GRADIENT = "gradient"
    NORM = "norm"
    PARAMETER = "parameter"
    REPLICA = "replica"


ALL_SHARES = "all data ranks together"
"""Name of the comparison of all shares with the whole batch."""

ORDER = {quantity: place for place, quantity in enumerate(Quantity)}


@attrs.frozen(kw_only=True)
class Comparison:
    """How far one rank is from one process."""

    quantity: Quantity
    """What was compared."""

    name: str
    """The parameter's name; for a share the data rank; empty for what there is one of."""

    rank: int
    """Which rank found it so."""

    microbatches: int
    """In how many parts each data rank took its share."""

    schedule: str = ""
    """Of the pipeline, where there is one."""

    step: int
    """After which step; 0 is before the first."""

    ratio: float
    """Least-squares factor from the expected value to the one found: 1 is right, 2 is twice as much."""

    error: float
    """Norm of the difference to the expected value, relative to the norm of that one."""

    limit: float
    """Largest error that passes."""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit

    @property
    def badness(self) -> float:
        """The error, infinite where it is not a number."""
        return math.inf if math.isnan(self.error) else self.error


@torch.no_grad()
def ratio_and_error(found: Tensor, expected: Tensor, *, floor: float = 0.0) -> tuple[float, float]:
    """Least-squares ratio of two tensors, and the norm of their difference relative to the second.

    Args:
        found: Of the shape of ``expected``.
        expected: The truth.
        floor: Added to the norm by which is divided: what is smaller than this does not have to be exact.
    """
    found, expected = found.double(), expected.double()
    size = torch.linalg.vector_norm(expected).item()
    difference = torch.linalg.vector_norm(found - expected).item()
    ratio = (found * expected).sum().item() / size**2 if size else math.inf
    if difference == 0:
        return 1.0, 0.0
    return ratio, difference / (size + floor) if size + floor else math.inf
