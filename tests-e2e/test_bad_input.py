"""What a user sees who asks the example for what cannot be done: one clear error, soon, on any number of ranks."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pretrain
import pytest

from d9d.loop.config import from_command_line, load
from d9d.mesh.testing import WorldError, run_job, run_world


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--trainer.stps", "3"], "trainer.stps: no such field; did you mean 'steps'?"),
        (["--export", '"false"'], "export: expected bool, found 'false'"),
        (["--export", "no"], "export: expected bool, found 'no'"),
        (["--trainer.steps", "3.9"], "trainer.steps: expected int, found 3.9"),
        (["--mesh.replicate", "0"], "mesh: mesh.replicate = 0: a degree is a positive number, or -1"),
        (["--config", "absent.toml"], "config file 'absent.toml' does not exist (looked from "),
    ],
)
def test_a_problem_in_the_configuration_is_one_line_and_exit_code_2(script, capsys, arguments, problem):
    with pytest.raises(SystemExit) as exited:
        from_command_line(pretrain.PretrainConfig, arguments, file=script.with_name("small.toml"))
    assert exited.value.code == 2
    count, found, hint = capsys.readouterr().err.splitlines()
    assert count == "1 problem in the configuration:"
    assert found.strip().startswith(problem)
    assert hint == "(--help lists all fields)"


def test_degrees_that_do_not_fit_the_world_end_the_script(script, tiny):
    config = load(pretrain.PretrainConfig, script.with_name("small.toml"), [*tiny, "--mesh.replicate", "4"])
    [ended] = run_job(1, pretrain.main, config)
    assert ended.exit_code == 1
    assert ended.output.splitlines()[-1] == (
        "ValueError: the mesh (replicate 4) needs 4 ranks, and 1 were started: "
        "start 4, change a degree, or set one to -1"
    )


def test_fewer_experts_than_ranks_to_hold_them_end_every_rank(script, tiny):
    layout = ["--mesh.replicate", "2", "--mesh.expert", "2", "--model.num_experts", "1", "--model.top_k", "1"]
    config = load(pretrain.PretrainConfig, script.with_name("small.toml"), [*tiny, *layout])
    for ended in run_job(2, pretrain.main, config):
        assert ended.exit_code == 1
        assert "ValueError: 1 experts do not divide over 2 expert-parallel ranks" in ended.output


def test_a_missing_checkpoint_file_costs_steps_or_is_an_error(script: Path, tiny, tmp_path):
    arguments = [*tiny, "--trainer.steps", "6", "--trainer.checkpoint_every", "3", "--export", "false"]
    config = load(pretrain.PretrainConfig, script.with_name("small.toml"), arguments)
    checkpoints = tmp_path / "run" / "checkpoints"

    run_world(1, _run, config)
    (checkpoints / "step-00000006" / "rank-00000.safetensors").unlink()
    [(output, log)] = run_world(1, _run, config)
    assert f"WARNING d9d.ckpt: skipping the broken checkpoint {checkpoints / 'step-00000006'}" in log
    assert "at step 3 " in output

    for directory in checkpoints.iterdir():
        (directory / "rank-00000.safetensors").unlink()
    with pytest.raises(WorldError, match=r"no checkpoint in '.*/checkpoints' is complete"):
        run_world(1, _run, config)


def _run(config: pretrain.PretrainConfig) -> tuple[str, str]:
    """Run the example in a worker of a world, whose output pytest may not see; what it printed."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as log:
        pretrain.main(config)
    return output.getvalue(), log.getvalue()
