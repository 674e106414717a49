"""Pipeline parallelism: schedules as data, a simulator that proves them, and an executor that runs them.

A `Schedule` orders the forwards and backwards of each rank (`Program`), `derive` completes them with transfers and
gathers, `simulate` proves and times them, `Executor` runs them. The functions behind the schedules are in
`d9d.parallel.pipeline.schedules`; ``python -m d9d.parallel.pipeline`` lists and draws them.
"""

from ._action import Action, Op
from ._backward import WeightBackward, backward, backward_inputs
from ._costs import UNIT_COSTS, Costs
from ._csv import from_csv, to_csv
from ._derive import derive
from ._error import ProgramError
from ._executor import Executor
from ._join import Branch, join
from ._laid_out import LaidOutStage, sync_stages
from ._layers import distribute_layers
from ._picture import to_svg, to_text
from ._placement import loop_placement, v_placement
from ._program import Program
from ._schedule import Schedule
from ._simulate import Event, Simulation, simulate
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
    "Op",
    "Program",
    "derive",
    "from_csv",
    "loop_placement",
    "to_csv",
    "v_placement",
    # simulator and pictures
    "UNIT_COSTS",
    "Costs",
    "Event",
    "ProgramError",
    "Simulation",
    "simulate",
    "to_svg",
    "to_text",
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
    # stages
    "LaidOutStage",
    "Stage",
    "StageRuntime",
    "SupportsTies",
    "TiedParameters",
    "distribute_layers",
    "sync_stages",
    # running them
    "Executor",
    # split backward
    "Branch",
    "WeightBackward",
    "backward",
    "backward_inputs",
    "join",
]
