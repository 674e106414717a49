"""The README's snippets run as they stand."""

import re
from pathlib import Path

import pytest

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel.certify.__main__ import main as certify_main
from d9d.parallel.pipeline import Schedule, derive, simulate
from d9d.parallel.pipeline.__main__ import main as pipeline_main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TRAINING, CERTIFIED, SCHEDULE, STAGES, STAGED, SPLIT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def arguments_of(module: str, first: str) -> list[str]:
    """Of the command in the README that starts so."""
    [arguments] = re.findall(rf"```\npython -m {re.escape(module)} ({first}.*?)\n```", README)
    return arguments.split()


@pytest.mark.parametrize("snippet", [TRAINING, SPLIT], ids=["training", "split backward"])
def test_it_runs(snippet):
    exec(compile(snippet, "README.md", "exec"), {})


def test_the_model_is_certified_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_model.py").write_text(CERTIFIED)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert certify_main(arguments_of("d9d.parallel.certify", "my_model")) == 0
    assert "3 passed, 0 failed, 0 refused" in capsys.readouterr().out


def test_the_picture_is_what_the_command_shows(capsys):
    assert pipeline_main(arguments_of("d9d.parallel.pipeline", "show 1f1b")) == 0
    assert f"```\n{capsys.readouterr().out}```\n" in README


def test_the_table_of_schedules_is_what_the_simulator_finds():
    rows = re.findall(r"\| `(\S+)` \| (\d) \| (\S+) \| ([\d, ]+) \|", README)
    assert {kind for kind, *_ in rows} == Schedule.kinds().keys() - {"inference", "one-by-one"}
    for kind, *row in rows:
        schedule = Schedule.kinds()[kind]()
        found = simulate(derive(schedule.program(ranks=4, microbatches=8)))
        assert row == [str(schedule.stages_per_rank), f"{found.bubble:.1%}", ", ".join(map(str, found.peak_live))], kind


def test_the_schedule_is_known_to_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_schedules.py").write_text(SCHEDULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pipeline_main(arguments_of("d9d.parallel.pipeline", "show one-by-one")) == 0
    assert capsys.readouterr().out.count("2 ranks, 2 stages, 3 microbatches: step time 18, bubble 50.0%") == 2


def _train_stages() -> list[float]:
    namespace = {"__name__": "readme"}
    exec(compile(STAGES, "README.md", "exec"), namespace)
    with DistContext.launch(MeshConfig(pipeline=-1), "cpu") as context:
        return namespace["train"](context)


def test_the_stages_train_in_one_process_and_on_two_ranks_alike():
    [alone], first, second = run_world(1, _train_stages), *run_world(2, _train_stages)
    assert alone[-1] < 0.1 * alone[0]
    assert first == second == pytest.approx(alone, rel=1e-4)


def test_the_stages_run_as_a_script(capsys):
    exec(compile(STAGES, "README.md", "exec"), {"__name__": "__main__"})
    first, last = map(float, capsys.readouterr().out.split(" to "))
    assert last < 0.1 * first


def test_the_stages_are_certified_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_stages.py").write_text(f"{STAGES}\n\n{STAGED}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert certify_main(arguments_of("d9d.parallel.certify", "my_stages")) == 0
    assert "2 passed, 0 failed, 0 refused" in capsys.readouterr().out
