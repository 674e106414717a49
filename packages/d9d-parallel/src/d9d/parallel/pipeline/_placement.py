"""Which rank holds which stage."""


def loop_placement(*, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages go round the ranks: stage s lives on rank s % ranks.

    Raises:
        ValueError: If a count is below 1.
    """
    _at_least_one(ranks=ranks, stages_per_rank=stages_per_rank)
    return tuple(range(ranks)) * stages_per_rank


def v_placement(*, ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down and up again: rank r holds stages r and 2·ranks − 1 − r.

    Raises:
        ValueError: If there is no rank.
    """
    _at_least_one(ranks=ranks)
    return (*range(ranks), *reversed(range(ranks)))


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count!r} is not supported; the nearest supported count is 1")
