"""One line about how the run goes: redrawn on a terminal, now and then anywhere else."""

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs
from attrs.validators import ge

from ._tracker import Number, Tracker, TrackerConfig

if TYPE_CHECKING:
    from rich.console import Console


class ProgressTracker(Tracker):
    """Shows step, loss, tokens/s, MFU where it is known, peak memory and the time left.

    Args:
        done: Steps made before this process.
        steps: Steps of the whole run.
        interval: Seconds between two lines where the console is not a terminal; the last step always has one.
        console: Where to write; stdout by default.
    """

    def __init__(self, *, done: int, steps: int, interval: float, console: "Console | None" = None) -> None:
        # Here and not above: rich is half of what `import d9d.loop` would take.
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

        self._console = console or Console(soft_wrap=True)
        self._done, self._steps, self._interval = done, steps, interval
        self._started = time.monotonic()
        self._due = self._started
        self._bar = Progress(
            BarColumn(20), TextColumn("{task.description}", markup=False), console=self._console, transient=False
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        if self._console.is_terminal:
            self._bar.start()

    def log(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Redraw the line, or print one if one is due."""
        now = time.monotonic()
        left = (now - self._started) / max(1, step - self._done) * (self._steps - step)
        line = progress_line(step, self._steps, metrics, seconds_left=left)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, description=line)
        elif now >= self._due or step == self._steps:
            self._console.print(line, markup=False, highlight=False)
            self._due = now + self._interval

    def close(self) -> None:
        """Leave the last line on the terminal."""
        if self._console.is_terminal:
            self._bar.stop()


@attrs.frozen(kw_only=True)
class ProgressConfig(TrackerConfig):
    """A progress line on stdout."""

    kind: ClassVar[str] = "progress"

    interval: float = attrs.field(default=5.0, validator=ge(0.0))
    """Seconds between two lines where stdout is not a terminal."""

    def open(self, directory: Path, *, done: int, steps: int) -> ProgressTracker:  # noqa: ARG002
        """See `TrackerConfig.open`."""
        return ProgressTracker(done=done, steps=steps, interval=self.interval)


def progress_line(step: int, steps: int, metrics: Mapping[str, Number], *, seconds_left: float) -> str:
    """The line itself, of those of the numbers that there are."""
    formats = {
        "loss": "loss {:.4f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "memory_gib": "{:.1f} GiB",
    }
    shown = [text.format(metrics[name]) for name, text in formats.items() if name in metrics]
    if count := metrics.get("nonfinite_steps"):
        shown.append(f"{count} steps not finite")
    return " · ".join([f"step {step}/{steps}", *shown, f"{timedelta(seconds=round(seconds_left))} left"])
