"""What the simulator says about programs that are right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.parallel.pipeline._action import Op
from d9d.parallel.pipeline._costs import Costs
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import dualpipev, gpipe, inference, interleaved_one_f_one_b, one_f_one_b, zbv


def longest_path(program, costs):
    """Times when computations end, by relaxation over all dependencies until nothing changes."""
    length = {Op.F: costs.forward, Op.I: costs.input_gradient, Op.W: costs.weight_gradient}
    length[Op.B] = [i + w for i, w in zip(costs.input_gradient, costs.weight_gradient)]
    ends = {(a.op, a.stage, a.microbatch): 0.0 for row in program.actions for a in row}
    changed = True
    while changed:
        changed = False
        for row in program.actions:
            clock = 0.0
            for a in row:
                needs = {Op.F: [(Op.F, a.stage - 1)], Op.W: []}.get(a.op, [(Op.B, a.stage + 1), (Op.I, a.stage + 1)])
                clock = max(clock, *(ends.get((op, s, a.microbatch), 0.0) for op, s in needs), 0.0)
                clock += length[a.op][a.stage]
                changed |= clock != ends[a.op, a.stage, a.microbatch]
                ends[a.op, a.stage, a.microbatch] = clock
    return ends


@given(
    schedule=st.sampled_from([gpipe, one_f_one_b, zbv, dualpipev]),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_times_are_the_longest_path(schedule, ranks, microbatches, data):
    program = schedule(ranks=ranks, microbatches=microbatches)
    times = st.lists(st.floats(0.1, 9), min_size=program.stages, max_size=program.stages)
    costs = Costs(forward=data.draw(times), input_gradient=data.draw(times), weight_gradient=data.draw(times), send=0.0)
    simulation = simulate(derive(program), costs)
    ends = longest_path(program, costs)
    assert simulation.step_time == pytest.approx(max(ends.values()))
    for events, busy in zip(simulation.timeline, simulation.busy):
        computed = [e for e in events if (e.action.op, e.action.stage, e.action.microbatch) in ends]
        assert busy == pytest.approx(sum(e.end - e.start for e in computed))
        for e in computed:
            assert e.end == pytest.approx(ends[e.action.op, e.action.stage, e.action.microbatch])


def test_a_transfer_delays_who_waits_for_it():
    program = derive(gpipe(ranks=2, microbatches=1))
    assert simulate(program, Costs(send=0.25)).step_time == 6.5
    assert simulate(program, Costs(send=[0.25, 99])).step_time == 6.5  # the last stage sends nothing on
    assert simulate(program, Costs(send=[1, 99])).step_time == 8


def test_a_transfer_hides_behind_a_computation():
    program = derive(inference(rank_of_stage=(0, 1), microbatches=8))
    assert simulate(program, Costs(send=0.5)).step_time == 9.5


def test_transfers_of_a_channel_take_turns():
    program = derive(inference(rank_of_stage=(0, 1), microbatches=3))
    simulation = simulate(program, Costs(forward=1, send=2))
    arrivals = [(e.start, e.end) for e in simulation.timeline[1] if e.action.op is Op.RECV_F]
    sends = [(e.start, e.end) for e in simulation.timeline[0] if e.action.op is Op.SEND_F]
    assert arrivals == sends == [(1, 3), (3, 5), (5, 7)]
    assert simulation.step_time == 8


def test_stages_may_differ_in_cost():
    simulation = simulate(derive(one_f_one_b(ranks=2, microbatches=4)), Costs(forward=[1, 2], input_gradient=[1, 2]))
    assert simulation.busy == (4 * 3, 4 * 5)
    assert simulation.step_time == 1 + 4 * 5 + 2


def test_the_bubble_counts_idle_time_of_all_ranks():
    simulation = simulate(derive(gpipe(ranks=2, microbatches=1)))
    assert simulation.busy == (3, 3)
    assert simulation.step_time == 6
    assert simulation.bubble == 0.5


def test_the_timeline_follows_the_program():
    program = derive(interleaved_one_f_one_b(stages_per_rank=2, ranks=2, microbatches=4), sharded=[0, 3])
    simulation = simulate(program)
    assert simulation.program is program
    assert tuple(tuple(event.action for event in row) for row in simulation.timeline) == program.actions


def test_costs_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="forward=-1.0: a cost is a time"):
        Costs(forward=-1)
    with pytest.raises(ValueError, match="send=.*nan"):
        Costs(send=[0, float("nan")])
    with pytest.raises(ValueError, match=r"forward=\(1.0, 2.0, 3.0\) has 3 costs, the program 2 stages"):
        simulate(derive(gpipe(ranks=2, microbatches=1)), Costs(forward=[1, 2, 3]))
