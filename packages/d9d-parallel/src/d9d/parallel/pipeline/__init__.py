"""Pipeline parallelism: schedules as data, a simulator that proves them, and an executor that runs them.

A `Schedule` orders the forwards and backwards of each rank (`Program`), `derive` completes them with transfers and
gathers, `simulate` proves and times them, `Executor` runs them. The schedules are in `d9d.parallel.pipeline.schedules`;
``python -m d9d.parallel.pipeline`` lists and draws them.
"""

from ._action import Action, Op
from ._costs import Costs
from ._derive import derive
from ._error import ProgramError
from ._executor import Executor
from ._laid_out import LaidOutStage
from ._layers import distribute_layers
from ._placement import loop_placement, v_placement
from ._program import Program
from ._schedule import Schedule
from ._simulate import Simulation, simulate
from ._stage import Stage, StageRuntime
from ._tied import SupportsTies, TiedParameters
from .schedules import (
    DualPipeV,
    GPipe,
    Inference,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
    OneFOneB,
    ZeroBubbleH1,
    ZeroBubbleV,
)

__all__ = [
    # programs
    "Action",
    "Costs",
    "Op",
    "Program",
    "ProgramError",
    "Simulation",
    "derive",
    "loop_placement",
    "simulate",
    "v_placement",
    # schedules
    "DualPipeV",
    "GPipe",
    "Inference",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "OneFOneB",
    "Schedule",
    "ZeroBubbleH1",
    "ZeroBubbleV",
    # running them
    "Executor",
    "LaidOutStage",
    "Stage",
    "StageRuntime",
    "SupportsTies",
    "TiedParameters",
    "distribute_layers",
]
