"""What follows from the order of computations."""

import pytest

from d9d.parallel.pipeline._action import Action, Op
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._program import Program
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import gpipe, inference, interleaved_one_f_one_b, looped_bfs, one_f_one_b, zbv


def program(placement, microbatches, *rows):
    return Program(placement, microbatches, tuple(tuple(map(Action.parse, row.split())) for row in rows))


def rows(program):
    return [" ".join(map(str, actions)) for actions in program.actions]


def test_sends_follow_at_once_and_receives_are_posted_one_computation_ahead():
    assert rows(derive(one_f_one_b(ranks=2, microbatches=3))) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1REDUCE_GRAD",
    ]


def test_stages_of_one_rank_hand_over_without_transfers():
    assert rows(derive(inference(rank_of_stage=(0, 0), microbatches=1))) == ["0F0 1F0"]
    assert "2RECV_F0" not in rows(derive(zbv(ranks=2, microbatches=2)))[1]


def test_receives_come_in_the_order_of_the_sends():
    computed = program((0, 1, 0), 2, "0F0 0F1 2F1 2F0", "1F0 1F1")
    assert rows(derive(computed)) == [
        "0F0 0SEND_F0 2RECV_F0 2RECV_F1 0F1 0SEND_F1 2F1 2F0",
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1",
    ]
    simulate(derive(computed))


def test_forwards_and_backwards_share_a_channel():
    complete = derive(interleaved_one_f_one_b(stages_per_rank=2, ranks=2, microbatches=4))
    sends = [a.other_end for a in complete.actions[0] if a.op in {Op.SEND_F, Op.SEND_B}]
    receives = [a for a in complete.actions[1] if a.op in {Op.RECV_F, Op.RECV_B}]
    assert sends == receives
    assert {a.op for a in receives} == {Op.RECV_F, Op.RECV_B}


def test_a_sharded_stage_is_gathered_once_and_reduced_before_it_is_freed():
    assert rows(derive(gpipe(ranks=1, microbatches=2), sharded=[0])) == [
        "0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD"
    ]


def test_the_next_stage_is_gathered_behind_a_computation():
    assert rows(derive(looped_bfs(stages_per_rank=2, ranks=1, microbatches=2), sharded=[0, 1])) == [
        "0UNSHARD 0F0 1UNSHARD 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD"
    ]


def test_with_one_stage_gathered_at_a_time_each_turn_gathers_anew():
    complete = derive(looped_bfs(stages_per_rank=2, ranks=1, microbatches=2), sharded=[0, 1], max_unsharded=1)
    (row,) = rows(complete)
    assert row == (
        "0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1B0 1B1 1REDUCE_GRAD 1RESHARD "
        "0UNSHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD"
    )


def test_what_is_needed_last_is_resharded_for_what_is_needed_now():
    computed = program((0, 0, 0), 1, "0F0 1F0 2F0 2B0 1B0 0B0")
    (row,) = rows(derive(computed, sharded=[0, 1, 2], max_unsharded=2))
    assert row == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2REDUCE_GRAD 2RESHARD 0UNSHARD "
        "1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD"
    )


def test_stages_that_are_not_sharded_are_left_alone():
    complete = derive(looped_bfs(stages_per_rank=2, ranks=2, microbatches=2), sharded=[3], max_unsharded=1)
    assert {a.stage for row in complete.actions for a in row if a.op is Op.UNSHARD} == {3}
    simulate(complete)


def test_inference_reduces_nothing():
    complete = derive(inference(rank_of_stage=(0, 1), microbatches=2), sharded=[0, 1])
    assert not complete.is_training
    assert rows(complete) == [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RESHARD",
        "1RECV_F0 1RECV_F1 1UNSHARD 1F0 1F1 1RESHARD",
    ]


def test_computations_are_what_was_completed():
    computed = zbv(ranks=3, microbatches=5)
    assert derive(computed, sharded=[0, 4]).computations() == computed


def test_what_cannot_be_derived_is_refused():
    complete = derive(gpipe(ranks=2, microbatches=1))
    with pytest.raises(ValueError, match="this one has 0RECV_B0 already"):
        derive(complete)
    with pytest.raises(ValueError, match=r"has no stages \[2, 5\], only 2"):
        derive(complete.computations(), sharded=[5, 1, 2])
    with pytest.raises(ValueError, match="max_unsharded=0"):
        derive(complete.computations(), sharded=[0], max_unsharded=0)


def test_actions_are_spelled_as_torch_spells_them():
    spelled = "0F0 12B3 1I0 1W0 2SEND_F3 3RECV_F3 1SEND_B2 0RECV_B2 0UNSHARD 0RESHARD 11REDUCE_GRAD"
    assert " ".join(str(Action.parse(text)) for text in spelled.split()) == spelled
    assert Action.parse(" 2SEND_F3 ") == Action(Op.SEND_F, 2, 3)
    assert Action(Op.SEND_F, 2, 3).other_end == Action(Op.RECV_F, 3, 3)
    assert Action(Op.RECV_B, 2, 3).other_end == Action(Op.SEND_B, 3, 3)


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "0UNSHARD1", "0F1x", "-1F0"])
def test_no_actions_are_refused(text):
    with pytest.raises(ValueError, match="is no action|needs a microbatch|leave the microbatch out"):
        Action.parse(text)
