"""Pictures of schedules from the command line."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from . import schedules  # noqa: F401 — imported to be known
from ._costs import Costs
from ._csv import to_csv
from ._derive import derive
from ._picture import to_svg, to_text
from ._schedule import Schedule
from ._simulate import simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Show a schedule, or list all; 0 if that was possible."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        for module in options.modules:
            importlib.import_module(module)
        text = _list() if options.command == "list" else _show(options)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{text}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d9d.parallel.pipeline", description="Simulate schedules of pipelines, and draw them."
    )
    parser.set_defaults(modules=[])
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the schedules that there are, and their settings")
    show = commands.add_parser("show", help="who does what when, the bubble, and what stays alive")
    show.add_argument("kind", help="one of those that list lists")
    show.add_argument("--ranks", type=int, required=True)
    show.add_argument("--microbatches", type=int, required=True)
    show.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings, as stages_per_rank=2")
    show.add_argument(
        "--costs",
        nargs="+",
        default=[],
        metavar="NAME=TIME",
        help=f"of {', '.join(field.name for field in attrs.fields(Costs))}; 1.5, or one per stage, as 1,1,1,1.4",
    )
    show.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG, too")
    show.add_argument("--csv", type=Path, metavar="FILE", help="write the computations as torch's CSV, too")
    for command in (listing, show):
        command.add_argument(
            "--import", nargs="+", default=[], dest="modules", metavar="MODULE", help="modules with more schedules"
        )
    return parser


def _list() -> str:
    lines = []
    for kind, schedule in sorted(Schedule.kinds().items()):
        settings = ", ".join(field.name for field in attrs.fields(schedule))
        summary = (schedule.__doc__ or "").partition("\n")[0]
        lines.append(f"{kind:<18}{summary}{f' Settings: {settings}.' if settings else ''}")
    return "\n".join(lines)


def _show(options: argparse.Namespace) -> str:
    kinds = Schedule.kinds()
    if options.kind not in kinds:
        raise ValueError(f"there is no schedule {options.kind!r}, only {sorted(kinds)!r}")
    schedule = _make(kinds[options.kind], options.set, _setting)
    costs = _make(Costs, options.costs, _cost)
    program = schedule.program(ranks=options.ranks, microbatches=options.microbatches)
    simulation = simulate(derive(program), costs)
    if options.svg:
        options.svg.write_text(to_svg(simulation))
    if options.csv:
        options.csv.write_text(to_csv(program))
    return to_text(simulation)


def _make(kind: type[Any], texts: Sequence[str], parse: Callable[[type[Any] | None, str], Any]) -> Any:
    """Build a config from NAME=VALUE texts."""
    types = {field.name: field.type for field in attrs.fields(kind)}
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in types:
            raise ValueError(f"{text!r} is not NAME=VALUE with a name of {list(types)!r}")
        try:
            values[name] = parse(types[name], value)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
    return kind(**values)


def _setting(kind: type[Any] | None, text: str) -> Any:
    return kind(text) if kind in {int, float} else text


def _cost(_: type[Any] | None, text: str) -> float | tuple[float, ...]:
    first, *others = map(float, text.split(","))
    return (first, *others) if others else first


if __name__ == "__main__":
    sys.exit(main())
