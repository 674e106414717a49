"""Optimizers whose state exists from the start and has names, and learning rates that are functions of the step."""

from ._adamw import AdamW
from ._config import AdamWConfig, NamedStateOptimizer, OptimizerConfig
from ._groups import decay_groups
from ._schedule import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule, set_learning_rate

__all__ = [
    "AdamW",
    "AdamWConfig",
    "ConstantSchedule",
    "CosineSchedule",
    "LinearSchedule",
    "NamedStateOptimizer",
    "OptimizerConfig",
    "Schedule",
    "decay_groups",
    "set_learning_rate",
]
