"""What the simulator says about programs that are right."""

import pytest

from d9d.parallel.pipeline._costs import Costs
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import gpipe, one_f_one_b


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_the_bubble_of_one_stage_per_rank(schedule, ranks, microbatches):
    simulation = simulate(derive(schedule(ranks=ranks, microbatches=microbatches)))
    assert simulation.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_1f1b_holds_no_more_microbatches_than_ranks_follow():
    assert simulate(derive(one_f_one_b(ranks=4, microbatches=8))).peak_live == (4, 3, 2, 1)
    assert simulate(derive(gpipe(ranks=4, microbatches=8))).peak_live == (8, 8, 8, 8)


def test_a_transfer_delays_who_waits_for_it():
    program = derive(gpipe(ranks=2, microbatches=1))
    assert simulate(program, Costs(send=0.25)).step_time == pytest.approx(6.5)
    assert simulate(program, Costs(send=[0.25, 99])).step_time == pytest.approx(6.5)  # the last stage sends nothing on
