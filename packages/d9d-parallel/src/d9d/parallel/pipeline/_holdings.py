"""Which rank holds which stage, as the modules themselves have it."""

from collections.abc import Collection, Mapping

import attrs
from torch import nn
from torch.distributed import ProcessGroup

from d9d.mesh import all_gather_objects


@attrs.frozen
class _Holding:
    """What one rank was given."""

    stages: tuple[int, ...]
    idle_runtimes: tuple[int, ...]
    """Stages that a runtime is for, and that are elsewhere."""


def placement_of(
    stages: Mapping[int, nn.Module], runtimes: Collection[int], stages_per_rank: int, group: ProcessGroup
) -> tuple[int, ...]:
    """The rank that holds each stage, in the order of the model; collective.

    Args:
        stages: Of this rank.
        runtimes: The stages that there is a runtime for.
        stages_per_rank: How many stages the schedule has on each rank.
        group: The pipeline's ranks.

    Raises:
        ValueError: On every rank, if ranks and stages do not fit; says what each rank was given.
    """
    mine = _Holding(tuple(sorted(stages)), tuple(sorted(set(runtimes) - stages.keys())))
    holdings = all_gather_objects(mine, group)
    found = {rank: list(holding.stages) for rank, holding in enumerate(holdings)}
    count = stages_per_rank * len(holdings)
    holders = {stage: rank for rank, holding in enumerate(holdings) for stage in holding.stages}
    if any(len(given) != stages_per_rank for given in found.values()) or sorted(holders) != list(range(count)):
        raise ValueError(
            f"the ranks were given the stages {found} (rank: stages); the schedule has {stages_per_rank} on each of "
            f"{len(holdings)} ranks: give each of the stages 0 to {count - 1} to one rank"
        )
    for rank, holding in enumerate(holdings):
        if holding.idle_runtimes:
            raise ValueError(
                f"rank {rank} was given runtimes of the stages {list(holding.idle_runtimes)}, and holds {found[rank]}"
            )
    return tuple(holders[stage] for stage in range(count))
