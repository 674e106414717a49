"""Programs go to torch's pipeline CSV and back; torch's own reader is the judge."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from d9d.parallel.pipeline._csv import from_csv, to_csv
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import (
    dualpipev,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zbv,
)

PROGRAMS = {
    "gpipe": gpipe(ranks=2, microbatches=3),
    "1f1b": one_f_one_b(ranks=4, microbatches=8),
    "interleaved-1f1b": interleaved_one_f_one_b(stages_per_rank=2, ranks=4, microbatches=8),
    "zb-h1": zb_h1(ranks=4, microbatches=8),
    "interleaved-zb": interleaved_zero_bubble(stages_per_rank=3, ranks=2, microbatches=4),
    "zbv": zbv(ranks=4, microbatches=9),
    "dualpipev": dualpipev(ranks=4, microbatches=8),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_there_and_back(name):
    program = PROGRAMS[name]
    complete = derive(program, sharded=[0, program.stages - 1])
    assert from_csv(to_csv(program)) == program
    assert from_csv(to_csv(complete)) == complete


def test_programs_of_forwards_only_and_single_microbatches_too():
    for program in (inference(rank_of_stage=(0, 1, 1, 0), microbatches=3), gpipe(ranks=3, microbatches=1)):
        assert from_csv(to_csv(program)) == program


def torch_runtime(program):
    """Torch's runtime of a schedule without the stages of a model."""
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime.pp_group_size, runtime._stages = {}, program.ranks, []
    runtime._num_stages, runtime._n_microbatches = program.stages, program.microbatches
    return runtime


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_reads_computations_and_accepts_them(name, tmp_path):
    program = PROGRAMS[name]
    (tmp_path / "schedule.csv").write_text(to_csv(derive(program).computations()))
    runtime = torch_runtime(program)
    torch_schedules.PipelineScheduleMulti._load_csv(runtime, str(tmp_path / "schedule.csv"))
    assert runtime.stage_index_to_group_rank == dict(enumerate(program.rank_of_stage))
    assert [[str(action) for action in runtime.pipeline_order[rank]] for rank in range(program.ranks)] == [
        [str(action) for action in actions] for actions in program.actions
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_reads_every_action_of_a_complete_program(name):
    program = derive(PROGRAMS[name], sharded=[0])
    for action in (action for actions in program.actions for action in actions):
        read = torch_schedules._Action.from_str(str(action))
        assert (read.stage_index, read.microbatch_index) == (action.stage, action.microbatch)
        assert read.computation_type.value == {"REDUCE": "REDUCE_GRAD"}.get(action.op.value, action.op.value)


def test_what_torch_writes_is_read():
    rows = (
        "0F0,0F1,,,0B0,,(0F2;0B1)OVERLAP_F_B,,0B2\r\n",
        ",1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1F1,1B1,1F2,1B2,1WAIT_REDUCE_GRAD\r\n",
    )
    program = from_csv("".join(rows))
    assert program.rank_of_stage == (0, 1)
    assert program.microbatches == 3
    assert [" ".join(map(str, row)) for row in program.actions] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1SEND_B0 1F1 1B1 1F2 1B2",
    ]
    assert simulate(derive(program.computations())).step_time > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n1F0,one\n", "row 1, column 1: 'one' is no action"),
        ("0F0,0B0\n2F0,2B0\n", r"found \(stage, rank\) \[\(0, 0\), \(2, 1\)\]"),
        ("0F0,0F2\n1F0,1F2\n", r"microbatches \[0, 2\]"),
        ("0F0,0B0,1F0\n1F0,1B0\n", r"\(1, 0\), \(1, 1\)"),
        ("", "needs microbatches"),
    ],
)
def test_tables_that_are_no_programs_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        from_csv(text)
