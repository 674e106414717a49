"""Which layers of a model a stage holds."""


def distribute_layers(layers: int, stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Cut a stack of equal layers into consecutive stages, so that the most expensive stage costs least.

    Where several cuts do, the first stages get fewer layers: under 1F1B they hold the most microbatches.

    Args:
        layers: Number of layers.
        stages: Number of stages; each gets a layer.
        first: What the first stage costs beyond its layers (the embedding), in layers.
        last: What the last stage costs beyond its layers (norm, head and loss), in layers.

    Returns:
        For each stage the numbers of its layers.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers!r} layers do not make {stages!r} stages: every stage takes at least one "
            "layer; take fewer ranks, or a schedule with fewer stages on each"
        )
    costs = [1.0] * stages
    costs[0] += first
    costs[-1] += last
    counts = [1] * stages
    for _ in range(layers - stages):
        cheapest = min(reversed(range(stages)), key=costs.__getitem__)
        costs[cheapest] += 1.0
        counts[cheapest] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(range(end - count, end) for count, end in zip(counts, ends))
