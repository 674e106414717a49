"""The order of samples, and the batches of one data rank, as pure functions of (seed, step)."""

from ._batches import Batches, Collate, SizedDataset
from ._order import SampleOrder

__all__ = ["Batches", "Collate", "SampleOrder", "SizedDataset"]
