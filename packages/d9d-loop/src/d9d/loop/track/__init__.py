"""Where the numbers of a run go: JSON lines, a progress line, and what a third party adds."""

from ._jsonl import JsonLinesConfig, JsonLinesTracker
from ._progress import ProgressConfig, ProgressTracker
from ._speed import Speedometer, peak_flops
from ._tracker import Number, Tracker, TrackerConfig

__all__ = [
    "JsonLinesConfig",
    "JsonLinesTracker",
    "Number",
    "ProgressConfig",
    "ProgressTracker",
    "Speedometer",
    "Tracker",
    "TrackerConfig",
    "peak_flops",
]
