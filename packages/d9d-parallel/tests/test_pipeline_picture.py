"""Pictures of programs, and the command line that draws them."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest

from d9d.parallel.pipeline.__main__ import main
from d9d.parallel.pipeline._costs import Costs
from d9d.parallel.pipeline._csv import from_csv
from d9d.parallel.pipeline._derive import derive
from d9d.parallel.pipeline._picture import to_svg, to_text
from d9d.parallel.pipeline._schedule import Schedule
from d9d.parallel.pipeline._simulate import simulate
from d9d.parallel.pipeline.schedules import gpipe, one_f_one_b, zb_h1, zbv

SVG = "{http://www.w3.org/2000/svg}"


def test_a_row_a_rank_and_time_to_the_right():
    assert to_text(simulate(derive(one_f_one_b(ranks=2, microbatches=3)))).splitlines() == [
        "rank 0  F0 F1       B0--- F2 B1---    B2---",
        "rank 1     F0 B0--- F1 B1--- F2 B2---",
        "",
        "2 ranks, 2 stages, 3 microbatches: step time 12, bubble 25.0%",
        "most (stage, microbatch) alive, by rank: 2, 1",
    ]


def test_the_stage_is_told_where_a_rank_holds_several():
    picture = to_text(simulate(derive(zbv(ranks=1, microbatches=1))))
    assert picture.startswith("rank 0  0F0 1F0 1I0 0I0 0W0 1W0\n")


def test_cells_never_overlap_whatever_the_costs():
    for costs in (Costs(forward=0.37, input_gradient=0.411, weight_gradient=0.9), Costs(weight_gradient=0)):
        for row in to_text(simulate(derive(zb_h1(ranks=4, microbatches=6)), costs)).splitlines()[:4]:
            cells = re.findall(r"[FIW]\d+-*", row)
            shown = 18 if costs.weight_gradient else 12
            assert len(cells) == shown


def test_every_computation_is_a_box_with_a_tooltip():
    simulation = simulate(derive(zb_h1(ranks=2, microbatches=3)))
    root = ET.fromstring(to_svg(simulation))
    boxes = {group.find(f"{SVG}title").text: group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")}
    assert len(boxes) == 2 * 3 * 3
    first, second = boxes["0F0: 0 to 1"], boxes["0F1: 1 to 2"]
    assert float(second.get("x")) == float(first.get("x")) + float(first.get("width"))
    text = " ".join(root.itertext())
    assert f"bubble {simulation.bubble:.1%}" in text
    assert "alive, by rank: 2, 2" in text
    assert "gradient of weights" in text
    assert "backward" not in text


def test_stages_of_a_rank_are_told_apart():
    root = ET.fromstring(to_svg(simulate(derive(zbv(ranks=1, microbatches=1)))))
    colours = {
        group.find(f"{SVG}title").text[:3]: group.find(f"{SVG}rect").get("fill") for group in root.iter(f"{SVG}g")
    }
    assert len(set(colours.values())) == 6


@pytest.mark.parametrize("kind", sorted(Schedule.kinds()))
def test_show(kind, tmp_path, capsys):
    files = ["--svg", str(tmp_path / "it.svg"), "--csv", str(tmp_path / "it.csv")]
    assert main(["show", kind, "--ranks", "4", "--microbatches", "8", *files]) == 0
    program = Schedule.kinds()[kind]().program(ranks=4, microbatches=8)
    assert capsys.readouterr().out == to_text(simulate(derive(program))) + "\n"
    assert ET.parse(tmp_path / "it.svg").getroot().tag == f"{SVG}svg"
    assert from_csv((tmp_path / "it.csv").read_text()) == program


def test_show_with_settings_and_costs(capsys):
    command = (
        "show inference --ranks 2 --microbatches 3 --set placement=v stages_per_rank=2 --costs forward=1,1,1,2 send=0.5"
    )
    assert main(command.split()) == 0
    assert "2 ranks, 4 stages, 3 microbatches: step time 10, bubble 25.0%" in capsys.readouterr().out


def test_list_names_all(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == sorted(Schedule.kinds())
    assert re.search(r"interleaved-1f1b .* Settings: stages_per_rank", listed)


def test_schedules_of_third_parties_are_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Schedule, "_members", dict(Schedule.kinds()))
    monkeypatch.delitem(sys.modules, "their_schedules", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "their_schedules.py").write_text(
        """
from typing import ClassVar
import attrs
from d9d.parallel.pipeline.schedules import GPipe

@attrs.frozen(kw_only=True)
class Mine(GPipe):
    kind: ClassVar[str] = "mine"
"""
    )
    assert main(["show", "mine", "--ranks", "2", "--microbatches", "3", "--import", "their_schedules"]) == 0
    assert capsys.readouterr().out == to_text(simulate(derive(gpipe(ranks=2, microbatches=3)))) + "\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("show 2f2b --ranks 2 --microbatches 3", "there is no schedule '2f2b', only"),
        ("show zbv --ranks 0 --microbatches 3", "the nearest supported count is 1"),
        ("show zbv --ranks 2 --microbatches 3 --set a=1", "'a=1' is not NAME=VALUE"),
        ("show looped-bfs --ranks 2 --microbatches 3 --set stages_per_rank=two", "'stages_per_rank=two': invalid"),
        ("show zbv --ranks 2 --microbatches 3 --costs forward=1,2", "2 costs, the program 4 stages"),
        ("show zbv --ranks 2 --microbatches 3 --costs forward=fast", "'forward=fast': could not"),
        ("list --import no_such_module", "no_such_module"),
    ],
)
def test_what_is_wrong_is_said(command, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err
