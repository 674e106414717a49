"""Pipeline parallelism: schedules as data, a simulator that proves them, and an executor that runs them."""

from ._layers import distribute_layers
from ._tied import SupportsTies, TiedParameters

__all__ = ["SupportsTies", "TiedParameters", "distribute_layers"]
