"""A trainer that is just a composition: data order, optimizers, logs, kill and resume.

Its parts are public by themselves: `d9d.loop.config`, `d9d.loop.data`, `d9d.loop.optim` and `d9d.loop.track`.
"""

from ._config import TrainerConfig
from ._evaluate import evaluate
from ._log import StepResult
from ._metric import WeightedMean
from ._protocols import Metric, ModelProvider, Task
from ._trainer import Trainer

__all__ = [
    "Metric",
    "ModelProvider",
    "StepResult",
    "Task",
    "Trainer",
    "TrainerConfig",
    "WeightedMean",
    "evaluate",
]
