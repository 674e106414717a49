"""How long the actions of a program take."""

from collections.abc import Mapping, Sequence

import attrs

from ._action import Op

PerStage = float | tuple[float, ...]


def _freeze(value: float | Sequence[float]) -> PerStage:
    return tuple(map(float, value)) if isinstance(value, Sequence) else float(value)


@attrs.frozen(kw_only=True)
class Costs:
    """Times of actions, in any unit; a number, or one per stage. B costs what I and W cost together.

    Raises:
        ValueError: If one is negative or not a number.
    """

    forward: PerStage = attrs.field(default=1.0, converter=_freeze)
    input_gradient: PerStage = attrs.field(default=1.0, converter=_freeze)
    weight_gradient: PerStage = attrs.field(default=1.0, converter=_freeze)
    send: PerStage = attrs.field(default=0.0, converter=_freeze)
    """Of a stage's output to the next stage, and of its gradient back, which is as large."""

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if not all(cost >= 0 for cost in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{name}={value!r}: a cost is a time; give 0 or more")

    def table(self, stages: int) -> Mapping[Op, Sequence[float]]:
        """The cost of F, B, I, W, SEND_F and SEND_B of each stage.

        Raises:
            ValueError: If costs are given per stage, for another number of stages.
        """
        forward, inputs, weights, send = (
            self._per_stage(name, stages) for name in ("forward", "input_gradient", "weight_gradient", "send")
        )
        return {
            Op.F: forward,
            Op.B: [i + w for i, w in zip(inputs, weights)],
            Op.I: inputs,
            Op.W: weights,
            Op.SEND_F: send,
            Op.SEND_B: (0.0, *send),  # a gradient is as large as the output of the stage before, to which it goes
        }

    def _per_stage(self, name: str, stages: int) -> Sequence[float]:
        value: PerStage = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * stages
        if len(value) != stages:
            raise ValueError(f"{name}={value!r} has {len(value)!r} costs, the program {stages!r} stages; give one each")
        return value


UNIT_COSTS = Costs()
"""F, I and W take 1, B takes 2, and transfers no time: the costs of the papers' figures."""
