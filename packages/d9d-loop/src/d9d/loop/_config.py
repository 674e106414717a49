"""What a run of the trainer is made of, apart from model, task and data."""

from pathlib import Path
from typing import Literal

import attrs
from attrs.validators import ge, gt, optional

from d9d.parallel import NonFinite
from d9d.parallel.pipeline import OneFOneB
from d9d.parallel.pipeline import Schedule as PipelineSchedule

from .optim import AdamWConfig, CosineSchedule, OptimizerConfig, Schedule
from .track import JsonLinesConfig, ProgressConfig, TrackerConfig


@attrs.frozen(kw_only=True)
class TrainerConfig:
    """A training run."""

    directory: Path
    """Of the run: its log and checkpoints. A run that finds checkpoints here goes on from the last one."""

    steps: int = attrs.field(validator=ge(1))
    """Optimizer steps of the whole run."""

    global_batch: int = attrs.field(validator=ge(1))
    """Samples of one step over all data ranks; a multiple of microbatch times their number."""

    microbatch: int | None = attrs.field(default=None, validator=optional(ge(1)))
    """Samples of one forward pass on one rank; changes memory and speed, not the result. None: all that the rank has in
    a step."""

    pipeline: PipelineSchedule = attrs.field(factory=OneFOneB)
    """Which rank of mesh.pipeline holds which stages, and in which order it runs microbatches through them; changes
    memory and speed, not the result. With one rank every microbatch runs forward and backward before the next."""

    seed: int = 0
    """Picks the initial weights, the order of samples and the dropout masks."""

    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Of the parameters; gradients are summed in float32, or float64 for float64."""

    max_norm: float | None = attrs.field(
        default=1.0,
        validator=optional(gt(0.0)),  # type: ignore[arg-type]  # attrs types it by the default, which is not None
    )
    """Gradients are clipped to this norm; none: never."""

    nonfinite: NonFinite = "raise"
    """What to do with a step whose gradients hold a NaN or an infinity: end the run with an error that names the
    parameters (raise), leave weights and optimizer as they are (skip), or step with gradients of zero, so that momentum
    and weight decay still act (zero). A skipped step is a step for the schedule, the order of samples and all counters:
    its samples do not come again. Only "zero" does not wait for the device in each step."""

    optimizer: OptimizerConfig = attrs.field(factory=AdamWConfig)
    """Updates the parameters."""

    schedule: Schedule = attrs.field(factory=CosineSchedule)
    """Course of the learning rate."""

    checkpoint_every: int = attrs.field(default=100, validator=ge(1))
    """Steps between two checkpoints; there is one at the end as well."""

    checkpoints_kept: int = attrs.field(default=2, validator=ge(1))
    """Checkpoints that stay when a new one is complete."""

    log_every: int = attrs.field(default=1, validator=ge(1))
    """Steps between two lines of the log; the device is waited for only then."""

    trackers: tuple[TrackerConfig, ...] = attrs.field(factory=lambda: (JsonLinesConfig(), ProgressConfig()))
    """Where the numbers go."""

    sequence: int | None = attrs.field(default=None, validator=optional(ge(1)))
    """Tokens of one sample, for the FLOPs in MFU; none: MFU is not shown."""
