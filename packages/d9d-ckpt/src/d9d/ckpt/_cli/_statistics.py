"""Statistics of a tensor, read in bounded pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .._source import Source
from .._tiles import tiles


def statistics_of(source: Source, name: str) -> Iterator[tuple[str, str]]:
    """Labels and values: extremes, mean and standard deviation of the finite elements, and how many are special.

    Of complex tensors the absolute values are taken.
    """
    count = zeros = nan = infinite = 0
    low, high = math.inf, -math.inf
    total = squares = 0.0
    for tile in tiles(name, source[name]):
        values = source.read(tile)
        values = values.abs().double() if values.is_complex() else values.double()
        nan += int(torch.isnan(values).sum())
        finite = values[torch.isfinite(values)]
        zeros += int((finite == 0).sum())
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            # by Chan's formula: sums of squares cancel where the mean is large
            fresh, mean = finite.numel(), float(finite.mean())
            apart = mean - total / count if count else 0.0
            squares += float((finite - mean).square().sum()) + apart**2 * count * fresh / (count + fresh)
            count, total = count + fresh, total + mean * fresh
        infinite += values.numel() - finite.numel()
    infinite -= nan
    if count:
        yield "min", f"{low:.6g}"
        yield "max", f"{high:.6g}"
        yield "mean", f"{total / count:.6g}"
        yield "std", f"{math.sqrt(squares / count):.6g}"
    yield "zeros", str(zeros)
    yield "NaN", str(nan)
    yield "inf", str(infinite)
