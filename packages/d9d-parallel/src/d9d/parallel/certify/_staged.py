"""What it takes to certify a pipeline: the model in stages, and its loss apart from it."""

from collections.abc import Callable, Sequence
from typing import Any, Generic

import attrs
from torch import nn

from .._loss import LossSum
from .._stage import StageInfo
from ..pipeline import OneFOneB, Schedule
from ._protocols import Batch


@attrs.frozen(kw_only=True)
class Staged(Generic[Batch]):
    """A model as `d9d.parallel.pipeline.Executor` runs it.

    Parameters have the names of the whole model, and are left on ``meta``: `d9d.mesh.materialize` gives them the values
    of the whole. A tie between stages is what ``tied_parameters`` of a stage says.
    """

    stage: Callable[[StageInfo], nn.Module]
    """Builds one stage, a module of ``(inputs, shared)``."""

    inputs: Callable[[Batch], tuple[Any, Any]]
    """Inputs and shared of a batch or of a part of it."""

    loss: Callable[[Any, Any], LossSum]
    """Summed loss and weight of what the last stage returned, and shared."""

    schedules: Sequence[Schedule] = (OneFOneB(),)
    """Each is run."""
