"""The order of samples, and the batches of one data rank, as pure functions of (seed, step)."""

from ._batches import Batches, Collate, SizedDataset
from ._device import to_device
from ._order import SampleOrder

__all__ = ["Batches", "Collate", "SampleOrder", "SizedDataset", "to_device"]
