"""Degrees of parallelism, and the check that they fit a world."""

import math
from typing import Final

import attrs

_WORLD_DIMS: Final = ("pipeline", "replicate", "shard", "context", "tensor")


@attrs.frozen(kw_only=True)
class MeshConfig:
    """Degrees of parallelism; the product of all but ``expert`` is the world size.

    One degree may be -1: it takes what the world leaves over. Experts are folded over the ranks of a pipeline
    stage, so ``expert`` does not multiply the world (see `d9d.mesh.domain_shapes`).
    """

    pipeline: int = 1
    """Pipeline stages in a row."""

    replicate: int = 1
    """Copies of the (possibly sharded) model that see different data."""

    shard: int = 1
    """Ranks that share one copy of the parameters (FSDP) and see different data."""

    context: int = 1
    """Ranks that share one sequence."""

    tensor: int = 1
    """Ranks that share one layer."""

    expert: int = 1
    """Ranks that share one set of experts."""

    def __attrs_post_init__(self) -> None:
        degrees = attrs.asdict(self)
        for name, degree in degrees.items():
            if degree < 1 and degree != -1:
                raise ValueError(
                    f"mesh.{name} = {degree!r}: a degree is a positive number, or -1 for what is left over"
                )
        open_degrees = [f"mesh.{name}" for name, degree in degrees.items() if degree == -1]
        if len(open_degrees) > 1:
            raise ValueError(f"{' and '.join(open_degrees)} are all -1: only one degree can be what is left over")

    def resolve(self, world_size: int) -> "MeshConfig":
        """The same degrees for a given number of ranks, with -1 replaced.

        Raises:
            ValueError: The degrees do not multiply to the world size, or experts cannot be folded into it.
        """
        degrees = {name: getattr(self, name) for name in _WORLD_DIMS}
        product = math.prod(degree for degree in degrees.values() if degree != -1)
        asked = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != 1) or "all degrees 1"
        for name, degree in degrees.items():
            if degree == -1:
                if world_size % product:
                    raise ValueError(
                        f"mesh.{name} = -1 has no value: the other degrees ({asked}) make groups of {product} ranks, "
                        f"and {world_size} ranks do not divide into them"
                    )
                degrees[name] = world_size // product
                product = world_size
        if product != world_size:
            raise ValueError(
                f"the mesh ({asked}) needs {product} ranks, and {world_size} were started: "
                f"start {product}, change a degree, or set one to -1"
            )
        stage_ranks = world_size // degrees["pipeline"]
        resolved = attrs.evolve(self, **degrees, expert=stage_ranks if self.expert == -1 else self.expert)
        resolved.fold_experts()
        return resolved

    def fold_experts(self) -> tuple[int, int, int]:
        """Sizes of ``ep_replicate``, ``ep_shard`` and ``ep``: how the ranks of one stage hold the experts.

        Experts take the fastest ranks first. With ``inner = shard · context · tensor`` they either split a shard
        group (``expert`` divides ``inner``) or span whole ones (``inner`` divides ``expert``).

        Raises:
            ValueError: Neither holds.
        """
        inner = self.shard * self.context * self.tensor
        if inner % self.expert == 0:
            return self.replicate, inner // self.expert, self.expert
        if self.expert % inner == 0 and self.replicate % (self.expert // inner) == 0:
            return self.replicate * inner // self.expert, 1, self.expert
        legal = [d for d in range(1, self.replicate * inner + 1) if self._folds(d, inner)]
        raise ValueError(
            f"mesh.expert = {self.expert} does not fold into replicate {self.replicate} × (shard · context · tensor) "
            f"{inner}: choose one of {', '.join(map(str, legal))}"
        )

    def _folds(self, expert: int, inner: int) -> bool:
        return inner % expert == 0 or (expert % inner == 0 and self.replicate % (expert // inner) == 0)
