from types import SimpleNamespace
from typing import ClassVar

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.loop.config import ConfigError, load
from d9d.loop.optim import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule, set_learning_rate


@attrs.frozen(kw_only=True)
class Run:
    schedule: Schedule = attrs.field(default=CosineSchedule(warmup=2))


@settings(deadline=None)
@given(warmup=st.integers(0, 50), steps=st.integers(1, 200), final=st.floats(0, 1))
def test_rates_rise_to_one_then_fall_towards_the_final_one(warmup, steps, final):
    for schedule in (
        ConstantSchedule(warmup=warmup),
        LinearSchedule(warmup=warmup, final=final),
        CosineSchedule(warmup=warmup, final=final),
    ):
        factors = [schedule.factor(step, steps) for step in range(steps)]
        peak = min(max(warmup - 1, 0), steps - 1)
        assert factors[: peak + 1] == sorted(factors[: peak + 1])
        assert factors[peak:] == sorted(factors[peak:], reverse=True)
        assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
        if warmup <= steps:
            assert factors[peak] == pytest.approx(1.0)


def test_values():
    assert [LinearSchedule(warmup=2, final=0.0).factor(step, 6) for step in range(6)] == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert CosineSchedule(warmup=0, final=0.2).factor(5, 10) == pytest.approx(0.6)
    assert [ConstantSchedule().factor(step, 3) for step in range(3)] == [1, 1, 1]
    assert CosineSchedule(final=0.0).factor(99, 10) == pytest.approx(0.0)


def test_each_group_keeps_its_own_peak():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 2.0}, {"params": [torch.zeros(1)], "lr": 8.0}])
    assert set_learning_rate(optimizer, 0.5) == 1.0
    assert set_learning_rate(optimizer, 0.25) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
    assert set_learning_rate(SimpleNamespace(param_groups=[{"lr": 1.0}]), 0.5) == 0.5


def test_a_schedule_is_chosen_by_kind_and_a_third_party_may_join():
    @attrs.frozen(kw_only=True)
    class Staircase(Schedule):
        kind: ClassVar[str] = "staircase"
        every: int = 10

        def factor(self, step: int, steps: int) -> float:
            return 0.5 ** (step // self.every)

    assert load(Run, None, ["--schedule.warmup", "5"]).schedule == CosineSchedule(warmup=5)
    assert load(Run, None, ["--schedule.kind", "staircase", "--schedule.every", "2"]).schedule.factor(5, 10) == 0.25
    with pytest.raises(ConfigError, match=r"schedule: 'warmup' must be >= 0: -1"):
        load(Run, None, ["--schedule.warmup", "-1"])
