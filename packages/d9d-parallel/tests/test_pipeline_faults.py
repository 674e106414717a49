"""Programs that were broken by hand, each refused with rank, index and reason."""

import pickle

import attrs
import pytest

from d9d.parallel.pipeline._action import Action
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._error import ProgramError
from d9d.parallel.pipeline._program import Program
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import gpipe, inference, one_f_one_b, zb_h1, zbv

WHOLE = derive(one_f_one_b(ranks=2, microbatches=3))
# 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2 0REDUCE_GRAD
# 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1REDUCE_GRAD
SPLIT = derive(zb_h1(ranks=2, microbatches=3), sharded=[1])
# 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0W0 0RECV_B1 0F2 0SEND_F2 0I1 0RECV_B2 0W1 0I2 0W2 0REDUCE_GRAD
# 1RECV_F0 1UNSHARD 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1RECV_F2 1W0 1F2 1I2 1SEND_B2 1W1 1W2 1REDUCE_GRAD
# 1RESHARD
V = derive(zbv(ranks=2, microbatches=2))
GATHERED_TWICE = derive(gpipe(ranks=1, microbatches=2), sharded=[0])
# 0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD
INFERENCE = derive(inference(rank_of_stage=(0, 1), microbatches=2))


def edited(program, rank, edit):
    rows = [[str(action) for action in actions] for actions in program.actions]
    edit(rows[rank])
    return attrs.evolve(program, actions=tuple(tuple(map(Action.parse, row)) for row in rows))


def without(action):
    return lambda row: row.remove(action)


def swapped(one, other):
    def edit(row):
        i, j = row.index(one), row.index(other)
        row[i], row[j] = row[j], row[i]

    return edit


def replaced(old, new):
    def edit(row):
        row[row.index(old)] = new

    return edit


def inserted(new, *, before):
    return lambda row: row.insert(row.index(before), new)


def moved(action, *, before):
    def edit(row):
        row.remove(action)
        row.insert(row.index(before), action)

    return edit


def ordered(actions):
    return lambda row: row.sort(key=actions.split().index)


def appended(action):
    return lambda row: row.append(action)


END = "the end"
FAULTS = {
    # name: (program, rank that is edited, edit, rank of the error, action at its index, reason)
    "a forward is missing": (INFERENCE, 0, without("0F1"), 0, "0SEND_F1", "needs 0F1 before it"),
    "the last forward is missing": (INFERENCE, 1, without("1F1"), 1, END, "1F1 is missing"),
    "a backward is missing": (WHOLE, 0, without("0B2"), 0, END, "0B2 is missing"),
    "a weight gradient is missing": (SPLIT, 0, without("0W1"), 0, END, "0W1 is missing"),
    "an input gradient is missing": (SPLIT, 0, without("0I2"), 0, "0W2", "needs 0I2 before it"),
    "a forward runs twice": (WHOLE, 0, inserted("0F0", before="0F1"), 0, "0F0", "0F0 runs twice"),
    "a backward runs twice": (WHOLE, 1, inserted("1B0", before="1F1"), 1, "1B0", "1B0 runs twice"),
    "the wrong microbatch": (WHOLE, 0, replaced("0B1", "0B2"), 0, "0B2", "0B2 runs twice"),
    "a microbatch that does not exist": (WHOLE, 0, replaced("0F2", "0F3"), 0, "0F3", "no microbatch 3, .* has 3"),
    "a stage that does not exist": (WHOLE, 1, replaced("1F2", "2F2"), 1, "2F2", "no stage 2, the program has 2"),
    "a stage of another rank": (WHOLE, 1, replaced("1F2", "0F2"), 1, "0F2", "belongs on rank 0, which holds stage 0"),
    "a backward before its forward": (WHOLE, 1, swapped("1F1", "1B1"), 1, "1B1", "needs 1F1 before it"),
    "an early I": (SPLIT, 1, moved("1I2", before="1F2"), 1, "1I2", "needs 1F2 before it"),
    "an early W": (SPLIT, 0, swapped("0I1", "0W1"), 0, "0W1", "needs 0I1 before it"),
    "W after a whole backward": (WHOLE, 0, inserted("0W0", before="0F2"), 0, "0W0", "needs 0I0 before it"),
    "a whole backward after I": (SPLIT, 0, replaced("0W0", "0B0"), 0, "0B0", "gradients that 0I0 added already"),
    "I after a whole backward": (WHOLE, 0, inserted("0I0", before="0F2"), 0, "0I0", "gradients that 0B0 added already"),
    "a stage of the same rank is skipped": (V, 1, moved("2F0", before="1F0"), 1, "2F0", "needs 1F0 before it"),
    "a backward on the same rank comes late": (V, 1, moved("2I0", before="2W0"), 1, "1I0", "needs 2(I|B)0 before it"),
    "a receive is missing": (WHOLE, 1, without("1RECV_F1"), 1, "1F1", "needs 1RECV_F1 before it"),
    "a late receive": (WHOLE, 0, moved("0RECV_B1", before="0B2"), 0, "0B1", "needs 0RECV_B1 before it"),
    "a receive without a send": (INFERENCE, 0, inserted("0RECV_B0", before="0F1"), 0, "0RECV_B0", "sends nothing"),
    "a send is missing": (WHOLE, 0, without("0SEND_F1"), 0, END, "0SEND_F1 is missing"),
    "a gradient's send is missing": (SPLIT, 1, without("1SEND_B2"), 1, END, "1SEND_B2 is missing"),
    "an early send": (WHOLE, 0, moved("0SEND_F1", before="0F1"), 0, "0SEND_F1", "needs 0F1 before it"),
    "an early gradient's send": (SPLIT, 1, moved("1SEND_B1", before="1I1"), 1, "1SEND_B1", "needs 1(I|B)1 before it"),
    "a send twice": (WHOLE, 0, inserted("0SEND_F0", before="0F1"), 0, "0SEND_F0", "0SEND_F0 runs twice"),
    "a receive twice": (WHOLE, 0, inserted("0RECV_B0", before="0B0"), 0, "0RECV_B0", "0RECV_B0 runs twice"),
    "a send from the last stage": (WHOLE, 1, inserted("1SEND_F0", before="1B0"), 1, "1SEND_F0", "no other end"),
    "a send to the own rank": (V, 1, inserted("1SEND_F0", before="2F0"), 1, "1SEND_F0", "no other end on another rank"),
    "swapped sends": (INFERENCE, 0, ordered("0F0 0F1 0SEND_F1 0SEND_F0"), 1, "1RECV_F0", "sends 0SEND_F1"),
    "swapped receives": (INFERENCE, 1, ordered("1RECV_F1 1RECV_F0 1F0 1F1"), 1, "1RECV_F1", "sends 0SEND_F0"),
    "a reshard too soon": (SPLIT, 1, moved("1RESHARD", before="1W1"), 1, "1W1", "stage 1 unsharded"),
    "a reshard before the reduction": (SPLIT, 1, swapped("1RESHARD", "1REDUCE_GRAD"), 1, "1REDUCE_GRAD", "unsharded"),
    "a late unshard": (SPLIT, 1, moved("1UNSHARD", before="1I0"), 1, "1F0", "stage 1 unsharded"),
    "an unshard is missing": (SPLIT, 1, without("1UNSHARD"), 1, "1F0", "stage 1 unsharded"),
    "an unshard twice": (GATHERED_TWICE, 0, inserted("0UNSHARD", before="0F1"), 0, "0UNSHARD", "is unsharded already"),
    "a reshard twice": (GATHERED_TWICE, 0, appended("0RESHARD"), 0, "0RESHARD", "is not unsharded"),
    "a reshard is missing": (SPLIT, 1, without("1RESHARD"), 1, END, "1RESHARD is missing"),
    "an early reduction": (SPLIT, 0, moved("0REDUCE_GRAD", before="0W2"), 0, "0REDUCE_GRAD", "comes before 0W2"),
    "a reduction is missing": (SPLIT, 0, without("0REDUCE_GRAD"), 0, END, "0REDUCE_GRAD is missing"),
    "a reduction twice": (WHOLE, 1, appended("1REDUCE_GRAD"), 1, "1REDUCE_GRAD", "runs twice"),
    "a reduction on another rank": (WHOLE, 1, appended("0REDUCE_GRAD"), 1, "0REDUCE_GRAD", "belongs on rank 0"),
    "a reduction without gradients": (INFERENCE, 0, appended("0REDUCE_GRAD"), 0, "0REDUCE_GRAD", "nothing to reduce"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_refused(name):
    program, edited_rank, edit, rank, action, reason = FAULTS[name]
    simulate(program)
    broken = edited(program, edited_rank, edit)
    with pytest.raises(ProgramError, match=reason) as caught:
        simulate(broken)
    error = caught.value
    row = [str(action) for action in broken.actions[rank]]
    assert error.rank == rank
    assert [*row, END][error.index] == action
    assert str(error) == f"rank {rank}, index {error.index}: {error.reason}"


def test_the_second_of_two_is_the_one_too_many():
    with pytest.raises(ProgramError) as caught:
        simulate(edited(WHOLE, 0, inserted("0F0", before="0F1")))
    assert caught.value.index == 3


def test_a_deadlock_names_who_waits_for_what():
    rows = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    program = Program((0, 1), 2, tuple(tuple(map(Action.parse, row.split())) for row in rows))
    with pytest.raises(ProgramError, match="deadlock") as caught:
        simulate(derive(program))
    assert str(caught.value) == (
        "rank 0, index 3: deadlock, each waits for the other: "
        "rank 0 at index 3 (0B0) for 1SEND_B0; rank 1 at index 3 (1F1) for 0SEND_F1"
    )


def test_the_error_is_a_value_error_that_travels_between_processes():
    error = pickle.loads(pickle.dumps(ProgramError(1, 2, "why")))
    assert isinstance(error, ValueError)
    assert (error.rank, error.index, error.reason) == (1, 2, "why")


@pytest.mark.parametrize(("placement", "microbatches"), [((0, 2), 1), ((0, 1), 0), ((-1, 0), 1)])
def test_a_program_that_cannot_be_is_not_made(placement, microbatches):
    with pytest.raises(ValueError, match="stages on others|nearest supported count"):
        Program(placement, microbatches, ((), ()))
