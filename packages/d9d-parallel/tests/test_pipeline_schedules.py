"""Every schedule makes programs that the simulator accepts, as good as its paper says."""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise, product
from typing import ClassVar

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.parallel.pipeline._action import Action, Op
from d9d.parallel.pipeline._costs import Costs
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._program import Program
from d9d.parallel.pipeline._schedule import Schedule
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import (
    DualPipeV,
    GPipe,
    Inference,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
    OneFOneB,
    ZeroBubbleH1,
    ZeroBubbleV,
    dualpipev,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zbv,
)

COUNTS = [1, 2, 3, 4, 8, 16, 32]
SCHEDULES: dict[str, Schedule] = {
    "gpipe": GPipe(),
    "1f1b": OneFOneB(),
    "zb-h1": ZeroBubbleH1(),
    "zbv": ZeroBubbleV(),
    "dualpipev": DualPipeV(),
    "inference-v": Inference(placement="v", stages_per_rank=2),
    **{
        f"{schedule.kind}-{stages}": schedule(stages_per_rank=stages)
        for schedule in (Inference, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble)
        for stages in (1, 2, 3)
    },
}


def simulated(program):
    return simulate(derive(program))


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_counts_are_supported(name):
    schedule = SCHEDULES[name]
    for ranks, microbatches in product([1, 2, 4], COUNTS):
        program = schedule.program(ranks=ranks, microbatches=microbatches)
        assert len(program.stages_of(ranks - 1)) == schedule.stages_per_rank
        simulation = simulate(derive(program, sharded=range(program.stages), max_unsharded=1))
        assert program.is_training == (schedule.kind != "inference")
        work = (3 if program.is_training else 1) * microbatches * schedule.stages_per_rank
        assert simulation.busy == (work,) * ranks
        assert simulation.step_time >= work + ranks - 1


@given(
    schedule=st.sampled_from(list(SCHEDULES.values())),
    stages=st.integers(1, 4),
    ranks=st.integers(1, 8),
    microbatches=st.integers(1, 32),
    limit=st.none() | st.integers(1, 4),
    costs=st.builds(
        Costs,
        forward=st.floats(0.01, 10),
        input_gradient=st.floats(0.01, 10),
        weight_gradient=st.floats(0.01, 10),
        send=st.floats(0, 10),
    ),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_any_counts_shards_and_costs(schedule, stages, ranks, microbatches, limit, costs, data):
    if "stages_per_rank" in attrs.fields_dict(type(schedule)) and schedule != Inference(
        placement="v", stages_per_rank=2
    ):
        schedule = attrs.evolve(schedule, stages_per_rank=stages)
    program = schedule.program(ranks=ranks, microbatches=microbatches)
    sharded = data.draw(st.sets(st.integers(0, program.stages - 1)))
    complete = derive(program, sharded=sharded, max_unsharded=limit)
    simulation = simulate(complete, costs)
    assert complete.computations() == program
    assert simulation.step_time > 0
    assert 0 <= simulation.bubble < 1
    for actions in complete.actions:
        gathered = 0
        for action in actions:
            gathered += (action.op is Op.UNSHARD) - (action.op is Op.RESHARD)
            assert limit is None or gathered <= limit


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, partial(interleaved_one_f_one_b, stages_per_rank=1)])
def test_bubble_of_one_stage_per_rank(schedule):
    for ranks, microbatches in product([1, 2, 4, 5], COUNTS):
        simulation = simulated(schedule(ranks=ranks, microbatches=microbatches))
        assert simulation.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("schedule", [looped_bfs, interleaved_one_f_one_b])
def test_more_stages_per_rank_divide_the_bubble(schedule):
    for ranks, stages, rounds in product([2, 4], [2, 3], [1, 2, 5]):
        simulation = simulated(schedule(stages_per_rank=stages, ranks=ranks, microbatches=rounds * ranks))
        assert simulation.bubble == pytest.approx((ranks - 1) / (stages * rounds * ranks + ranks - 1))


@pytest.mark.parametrize("microbatches", [5, 7, 9, 11])
def test_a_count_that_ranks_do_not_divide_costs_no_time(microbatches):
    simulation = simulated(interleaved_one_f_one_b(stages_per_rank=2, ranks=4, microbatches=microbatches))
    assert simulation.step_time == 3 * (2 * microbatches + 3)


def test_1f1b_holds_no_more_microbatches_than_ranks_follow():
    for ranks, microbatches in product([1, 2, 4, 7], COUNTS):
        simulation = simulated(one_f_one_b(ranks=ranks, microbatches=microbatches))
        assert simulation.peak_live == tuple(min(microbatches, ranks - rank) for rank in range(ranks))


def test_interleaved_1f1b_holds_what_the_paper_says():
    for ranks, stages in product([2, 4], [2, 3]):
        simulation = simulated(interleaved_one_f_one_b(stages_per_rank=stages, ranks=ranks, microbatches=4 * ranks))
        expected = tuple(2 * (ranks - rank - 1) + (stages - 1) * ranks + 1 for rank in range(ranks))
        assert simulation.peak_live == expected


def test_zb_h1_idles_a_third_of_1f1b_in_the_memory_of_its_first_rank():
    for ranks, microbatches in product([1, 2, 3, 4, 8], [8, 9, 16, 32]):
        simulation = simulated(zb_h1(ranks=ranks, microbatches=microbatches))
        baseline = simulated(one_f_one_b(ranks=ranks, microbatches=microbatches))
        assert 3 * sum(idle(simulation)) == sum(idle(baseline))
        assert simulation.peak_live == (ranks,) * ranks == (baseline.peak_live[0],) * ranks


def idle(simulation):
    return [simulation.step_time - busy for busy in simulation.busy]


def test_interleaved_zero_bubble_idles_a_third_of_interleaved_1f1b():
    for ranks, rounds in product([1, 2, 4], [1, 2, 4]):
        simulation = simulated(interleaved_zero_bubble(stages_per_rank=2, ranks=ranks, microbatches=ranks * rounds))
        assert simulation.step_time == 6 * ranks * rounds + ranks - 1


@pytest.mark.parametrize(("schedule", "more"), [(zbv, 0), (dualpipev, 1)])
def test_v_schedules_have_no_bubble_but_the_start_one_after_the_other(schedule, more):
    for ranks in (1, 2, 3, 4, 6):
        for microbatches in (2 * ranks, 2 * ranks + 1, 17, 32):
            simulation = simulated(schedule(ranks=ranks, microbatches=microbatches))
            assert simulation.step_time == 6 * microbatches + ranks - 1
            assert max(simulation.peak_live) <= 2 * ranks + more


def test_dualpipev_pairs_forwards_with_backwards_of_the_other_stage():
    program = dualpipev(ranks=4, microbatches=16)
    for rank, actions in enumerate(program.actions):
        down, up = program.stages_of(rank)
        pairs = pairwise(actions)
        paired = [(f, b) for f, b in pairs if f.op is Op.F and b.op is Op.B]
        assert len(paired) >= 16
        assert all({f.stage, b.stage} == {down, up} for f, b in paired)


@pytest.mark.parametrize(("placement", "time"), [((0, 1, 2, 3), 11), ((0, 1, 2, 3) * 2, 19)])
def test_inference_keeps_all_ranks_busy(placement, time):
    simulation = simulated(inference(rank_of_stage=placement, microbatches=8))
    assert simulation.step_time == time
    assert simulation.peak_live == (0,) * 4


def test_inference_in_a_v_goes_back_as_soon_as_it_can():
    simulation = simulated(inference(rank_of_stage=(0, 1, 2, 2, 1, 0), microbatches=8))
    assert simulation.step_time == 2 + 16 + 2  # the last rank starts after 2, works through, and 2 hops lead back


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_ranks_or_microbatches_are_refused_with_the_nearest_counts(name):
    with pytest.raises(ValueError, match="ranks=0 .* the nearest supported count is 1"):
        SCHEDULES[name].program(ranks=0, microbatches=4)
    with pytest.raises(ValueError, match="got 0; the nearest supported count is 1"):
        SCHEDULES[name].program(ranks=2, microbatches=0)


def test_no_stages_are_refused():
    with pytest.raises(ValueError, match="stages_per_rank=0 .* the nearest supported count is 1"):
        Interleaved1F1B(stages_per_rank=0).program(ranks=2, microbatches=4)
    with pytest.raises(ValueError, match="two stages per rank"):
        Inference(placement="v")


def test_the_issues_kinds_are_there():
    assert isinstance(Schedule.kinds(), Mapping)
    assert set(Schedule.kinds()) >= {
        "inference",
        "gpipe",
        "looped-bfs",
        "1f1b",
        "interleaved-1f1b",
        "zb-h1",
        "interleaved-zb",
        "zbv",
        "dualpipev",
    }
    assert Schedule.kinds()["zbv"] is ZeroBubbleV


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(Schedule, "_members", dict(Schedule.kinds()))


def test_a_third_party_registers_a_schedule(registry):
    @attrs.frozen(kw_only=True)
    class Sequential(Schedule):
        """One microbatch at a time."""

        kind: ClassVar[str] = "sequential"
        stages_per_rank: ClassVar[int] = 1

        def program(self, *, ranks, microbatches):
            rows = [[Action(op, rank, m) for m in range(microbatches) for op in (Op.F, Op.B)] for rank in range(ranks)]
            return Program(tuple(range(ranks)), microbatches, tuple(map(tuple, rows)))

    assert Schedule.kinds()["sequential"] is Sequential
    assert simulated(Sequential().program(ranks=3, microbatches=2)).step_time == 2 * 3 * 3


def test_a_kind_is_given_once(registry):
    with pytest.raises(ValueError, match=r"has kind='1f1b', which .*OneFOneB has already"):

        @attrs.frozen(kw_only=True)
        class Other(Schedule):
            kind: ClassVar[str] = "1f1b"
