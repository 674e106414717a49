"""What was found under one mesh."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs

from d9d.mesh import MeshConfig

from ._comparison import ORDER, Comparison, Quantity

Verdict: TypeAlias = Literal["passed", "failed", "refused"]


@attrs.frozen(kw_only=True)
class Failure:
    """One quantity that is wrong in the first step in which anything is."""

    worst: Comparison
    """That with the largest error."""

    ratios: tuple[float, ...]
    """The ratio that each rank found there, by rank."""

    names: tuple[str, ...]
    """Parameters (data ranks, for a share) that fail."""

    compared: int
    """Of how many."""


@attrs.frozen(kw_only=True)
class LayoutResult:
    """What was found under one mesh."""

    mesh: MeshConfig
    """Degrees."""

    refusal: str | None = None
    """Why ``parallelize`` refused the mesh, if it did."""

    comparisons: tuple[Comparison, ...] = ()
    """Everything that was compared, on every rank."""

    @property
    def verdict(self) -> Verdict:
        """One word for it."""
        if self.refusal is not None:
            return "refused"
        return "passed" if all(c.passed for c in self.comparisons) else "failed"

    @property
    def ranks(self) -> int:
        """Size of the world."""
        return world_size(self.mesh)

    def worst(self, quantity: Quantity, name: str | None = None) -> Comparison | None:
        """The comparison with the largest error, of all parameters or of one."""
        found = (c for c in self.comparisons if c.quantity is quantity and name in {None, c.name})
        return max(found, key=lambda c: c.badness, default=None)

    def failures(self) -> list[Failure]:
        """What is wrong in the first step in which anything is, causes before their consequences."""
        failed = [c for c in self.comparisons if not c.passed]
        if not failed:
            return []
        first = min(map(_when, failed))
        then = [c for c in self.comparisons if _when(c) == first]
        return [
            _failure([c for c in then if c.quantity is quantity])
            for quantity in sorted({c.quantity for c in then if not c.passed}, key=ORDER.__getitem__)
        ]


def world_size(mesh: MeshConfig) -> int:
    """How many ranks a mesh takes."""
    return mesh.pipeline * mesh.replicate * mesh.shard * mesh.context * mesh.tensor


def _when(comparison: Comparison) -> tuple[int, int, str]:
    return comparison.step, comparison.microbatches, comparison.schedule


def _failure(comparisons: Sequence[Comparison]) -> Failure:
    worst = max((c for c in comparisons if not c.passed), key=lambda c: c.badness)
    return Failure(
        worst=worst,
        ratios=tuple(c.ratio for c in sorted(comparisons, key=lambda c: c.rank) if c.name == worst.name),
        names=tuple(dict.fromkeys(c.name for c in comparisons if not c.passed)),
        compared=len({c.name for c in comparisons}),
    )
