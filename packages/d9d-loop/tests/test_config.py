from pathlib import Path
from typing import ClassVar, Literal

import attrs
import pytest
from cattrs.errors import ClassValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.loop.config import Choice, ConfigError, from_command_line, help_text, load
from d9d.loop.config._structure import strict_converter


@attrs.frozen(kw_only=True)
class Engine(Choice):
    """How it moves."""


@attrs.frozen(kw_only=True)
class Electric(Engine):
    kind: ClassVar[str] = "electric"

    volts: int = 12
    """Tension of the battery."""
    cells: tuple[int, ...] = (1, 2)


@attrs.frozen(kw_only=True)
class Steam(Engine):
    kind: ClassVar[str] = "steam"

    coal: float
    """Tonnes an hour."""


@attrs.frozen(kw_only=True)
class Wheels:
    count: int = 4
    size: tuple[float, float] = (1.0, 2.0)
    spare: bool = True


@attrs.frozen(kw_only=True)
class Car:
    """A car."""

    name: str
    """What is written on it."""
    wheels: Wheels = Wheels(count=6)
    engine: Engine = Electric(volts=48)
    colour: Literal["red", "blue"] = "red"
    limit: float | None = 1.0
    path: Path = Path("garage")
    doors: int | Literal["none of them"] = 3
    drivers: list[str] = attrs.field(factory=list)
    seats: dict[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Scalars:
    as_bool: bool = False
    as_int: int = 0
    as_float: float = 0.0
    as_str: str = ""


def problems(*overrides: str, file: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(Car, file, ["--name", "x", *overrides])
    return caught.value.problems


def test_the_command_line_overrides_the_file_which_overrides_the_defaults(tmp_path):
    file = tmp_path / "car.toml"
    file.write_text('name = "file"\ncolour = "blue"\n[wheels]\ncount = 3\nsize = [1, 2.5]\n')
    car = load(Car, file, ["--name=line", "--wheels.count", "5", "--limit", "none", "--seats.back", "3"])
    assert car.seats == {"back": 3}
    assert attrs.evolve(car, seats={}) == Car(
        name="line", colour="blue", wheels=Wheels(count=5, size=(1.0, 2.5)), limit=None
    )
    assert isinstance(car.wheels.size[0], float)


def test_what_is_left_out_comes_from_the_default_instance():
    car = load(Car, None, ["--name", "x", "--wheels.spare", "false", "--engine.cells", "[7]"])
    assert car.wheels == Wheels(count=6, spare=False)
    assert car.engine == Electric(volts=48, cells=(7,))


def test_another_kind_drops_the_default_instance():
    assert load(Car, None, ["--name", "x", "--engine.kind", "steam", "--engine.coal", "2"]).engine == Steam(coal=2.0)
    assert load(Car, None, ["--name", "x", "--engine", '{kind = "electric", volts = 1}']).engine.volts == 1
    assert problems("--engine.kind", "steam") == ("engine.coal: required, but not given",)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("--wheels.spare='false'", "wheels.spare: expected bool, found 'false' (str); write true or false"),
        ("--wheels.spare=1", "wheels.spare: expected bool, found 1 (int); write true or false"),
        ("--wheels.count=3.9", "wheels.count: expected int, found 3.9 (float)"),
        ("--wheels.count=true", "wheels.count: expected int, found True (bool)"),
        ("--limit=true", "limit: expected float, found True (bool)"),
        ("--limit=fast", "limit: expected float, found 'fast' (str)"),
        ("--wheels.size=[1]", "wheels.size: expected [float, float], found [1] (list)"),
        ("--wheels.size=[1, 'a']", "wheels.size[1]: expected float, found 'a' (str)"),
        ("--drivers=anna", "drivers: expected [str], found 'anna' (str)"),
        ("--seats=3", "seats: expected dict[str, int], found 3 (int)"),
        ("--seats.back=x", "seats.back: expected int, found 'x' (str)"),
        ("--colour=rad", "colour: found 'rad'; did you mean 'red'?"),
        ("--doors=1.5", "doors: expected int | 'none of them', found 1.5 (float)"),
        ("--wheels=4", "wheels: expected a table with fields of Wheels, found 4"),
        ("--wheels.cuont=4", "wheels.cuont: no such field; did you mean 'count'?"),
        ("--engine.vlots=4", "engine.vlots: no such field; did you mean 'volts'?"),
        ("--engine.kind=stream", "engine.kind: found 'stream'; did you mean 'steam'?"),
        ("--engine=steam", "engine: expected a table with a kind of Engine, found 'steam'"),
        (
            "--zzz=4",
            (
                "zzz: no such field; known: "
                "'colour', 'doors', 'drivers', 'engine', 'limit', 'name', 'path', 'seats', 'wheels'"
            ),
        ),
        ("--name=12", "name: expected str, found 12 (int); quote it to make it a str: '\"12\"'"),
        ("--path=700", "path: expected Path, found 700 (int); quote it to make it a str: '\"700\"'"),
        ("--wheels.spare=False", "wheels.spare: expected bool, found 'False' (str); write true or false"),
        ("wheels=4", "'wheels=4' is not an override; write --path.of.field value"),
        ("--wheels..count=4", "'--wheels..count=4' is not an override; write --path.of.field value"),
        ("--wheels", "--wheels has no value; write --wheels value"),
        ("--name.first=x", "name: set to 'x', so it has no 'first'"),
    ],
)
def test_one_clear_problem_each(override, problem):
    assert problems(override) == (problem,)


def test_all_problems_at_once():
    with pytest.raises(ConfigError, match="3 problems") as caught:
        load(Car, None, ["--wheels.spare", "'no'", "--limt", "3"])
    assert len(caught.value.problems) == 3


def test_a_missing_file_and_a_broken_file(tmp_path):
    (problem,) = problems(file=tmp_path / "absent.toml")
    assert "absent.toml' does not exist" in problem
    (tmp_path / "broken.toml").write_text("a = = 3")
    (problem,) = problems(file=tmp_path / "broken.toml")
    assert "broken.toml' is not TOML" in problem
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (problem,) = problems(file=tmp_path / "binary.toml")
    assert "binary.toml' is not TOML" in problem
    (problem,) = problems(file=tmp_path)
    assert "cannot be read: Is a directory" in problem


@settings(deadline=None)
@given(st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.booleans(), st.text()))
def test_a_scalar_is_taken_by_its_own_type_only(value):
    takers = {bool: {"as_bool"}, int: {"as_int", "as_float"}, float: {"as_float"}, str: {"as_str"}}[type(value)]
    for field in attrs.fields_dict(Scalars):
        if field in takers:
            assert getattr(strict_converter().structure({field: value}, Scalars), field) == value
        else:
            with pytest.raises(ClassValidationError):
                strict_converter().structure({field: value}, Scalars)


@settings(deadline=None)
@given(st.text())
def test_any_command_line_value_that_is_no_toml_literal_is_a_string(text):
    car = load(Car, None, ["--name", f"/{text}"])
    assert car.name == f"/{text}"


def test_a_third_party_joins_a_union_and_cannot_take_a_taken_kind():
    @attrs.frozen(kw_only=True)
    class Sail(Engine):
        kind: ClassVar[str] = "sail"
        area: int = 3

    assert load(Car, None, ["--name", "x", "--engine.kind", "sail"]).engine == Sail()
    with pytest.raises(ValueError, match="kind='steam', which"):

        @attrs.frozen(kw_only=True)
        class Again(Engine):
            kind: ClassVar[str] = "steam"


def test_a_union_of_a_package_that_cannot_import_choice():
    kinds: dict[str, type] = {}

    class Backend:
        @classmethod
        def kinds(cls):
            return kinds

    @attrs.frozen(kw_only=True)
    class Eager(Backend):
        kind: ClassVar[str] = "eager"
        chunk: int = 1

    kinds["eager"] = Eager

    @attrs.frozen(kw_only=True)
    class Attention:
        backend: Backend | None = None

    assert load(Attention, None, []).backend is None
    assert load(Attention, None, ["--backend.kind", "eager", "--backend.chunk", "2"]).backend == Eager(chunk=2)


def test_help_lists_every_field_with_type_default_and_docstring():
    text = help_text(Car)
    for line in (
        "--name str (required)",
        "    What is written on it.",
        "--wheels.count int (default: 6)",
        "--wheels.size [float, float] (default: [1.0, 2.0])",
        "--wheels.spare bool (default: true)",
        "--colour 'red' | 'blue' (default: red)",
        "--limit float | none (default: 1.0)",
        "  --engine.volts int (default: 48)",
        "  --engine.coal float (required)",
    ):
        assert line in text.splitlines(), text


def test_a_script_prints_its_problem_and_exits_with_2(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        from_command_line(Car, ["--config", str(tmp_path / "absent.toml")])
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        from_command_line(Car, ["--help"])
    assert "--wheels.count" in capsys.readouterr().out
    (tmp_path / "car.toml").write_text('name = "file"')
    assert from_command_line(Car, [f"--config={tmp_path / 'car.toml'}", "--limit", "2"]).limit == 2.0
