"""The schedules that come with d9d: pure functions, and a config class for each."""

from ._gpipe import GPipe, LoopedBFS, gpipe, looped_bfs
from ._one_f_one_b import OneFOneB, one_f_one_b

__all__ = ["GPipe", "LoopedBFS", "OneFOneB", "gpipe", "looped_bfs", "one_f_one_b"]
