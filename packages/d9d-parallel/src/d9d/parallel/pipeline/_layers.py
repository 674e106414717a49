"""Which layers of a model go into which stage."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


def distribute_layers(costs: Sequence[float], *, stages: int, embedding: float = 0.0, head: float = 0.0) -> list[range]:
    """Cut a sequence of layers into stages such that the slowest stage is as fast as can be, as it sets the pace.

    Among such cuts, the one whose stages differ least (by the sum of squares). A stage in the middle has a layer at
    least; the first and the last, which have the embedding and the head, may have none.

    Args:
        costs: Of each layer, in any unit.
        stages: Number of stages.
        embedding: What stage 0 costs besides, in that unit.
        head: What the last stage costs besides.

    Returns:
        The layers of each stage.

    Raises:
        ValueError: A cost is negative or not finite, or there are fewer layers than stages that need one.
    """
    if wrong := [cost for cost in (*costs, embedding, head) if not 0 <= cost < math.inf]:
        raise ValueError(f"costs are finite and not negative, got {wrong!r}")
    if stages < 1 or len(costs) < stages - 2:
        raise ValueError(f"{len(costs)} layers cannot be cut into stages={stages!r}: give 1 to {len(costs) + 2}")
    before = [0.0, *accumulate(costs)]

    def cost_of(stage: int, start: int, end: int) -> float:
        if start == end and 0 < stage < stages - 1:
            return math.inf
        return before[end] - before[start] + embedding * (stage == 0) + head * (stage == stages - 1)

    slowest, _ = _best_cut(len(costs), stages, cost_of, max)

    def square_of(stage: int, start: int, end: int) -> float:
        cost = cost_of(stage, start, end)
        return cost * cost if cost <= slowest else math.inf

    _, bounds = _best_cut(len(costs), stages, square_of, lambda first, rest: first + rest)
    return [range(start, end) for start, end in pairwise(bounds)]


def _best_cut(
    layers: int,
    stages: int,
    cost_of: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least combined cost of a cut, and where it cuts; tries all ends of each stage, O(stages · layers²)."""
    rest = [math.inf] * layers + [0.0]  # by first layer, of the stages looked at so far
    ends: list[list[int]] = []
    for stage in reversed(range(stages)):
        best = [
            min((combine(cost_of(stage, start, end), rest[end]), end) for end in range(start, layers + 1))
            for start in range(layers + 1)
        ]
        rest = [cost for cost, _ in best]
        ends.append([end for _, end in best])
    bounds = [0]
    for end in reversed(ends):
        bounds.append(end[bounds[-1]])
    return rest[0], bounds
