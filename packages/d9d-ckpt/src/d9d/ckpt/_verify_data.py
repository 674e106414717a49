"""Verifying the values of tensors."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import attrs
import torch
from torch import Tensor

from ._blocks import blocks
from ._findings import Problem, ProblemKind
from ._header import Entry
from ._memory import memory_of
from ._names import natural_key


@attrs.frozen
class Data:
    """Where the data of a tensor is."""

    name: str
    path: Path
    entry: Entry


def check_data(items: Iterable[Data], *, values: bool, contents: bool) -> tuple[list[Problem], list[Problem]]:
    """Reads all data once, if asked to look at anything, and returns problems and notes."""
    problems: list[Problem] = []
    same: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    for item in sorted(items, key=lambda item: natural_key(item.name)) if values or contents else ():
        nan = infinite = 0
        digest = hashlib.blake2b(digest_size=32)
        try:
            for block in blocks(item.path, item.entry):
                if contents:
                    digest.update(memory_of(block))
                if values:
                    found = count_not_finite(block)
                    nan, infinite = nan + found[0], infinite + found[1]
        except OSError as error:
            problems.append(Problem(ProblemKind.UNREADABLE, str(error)))
            continue
        if nan or infinite:
            text = f"{item.name!r} has {nan} NaN and {infinite} infinite of {item.entry.spec.numel} values"
            problems.append(Problem(ProblemKind.NOT_FINITE, text, item.path.name))
        if item.entry.spec.numel:
            same[str(item.entry.spec), digest.digest()].append(item.name)
    notes = [
        Problem(ProblemKind.EQUAL, f"{names} hold the same {spec}")
        for (spec, _), names in same.items()
        if contents and len(names) > 1
    ]
    return problems, notes


def count_not_finite(tensor: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return 0, 0
    if tensor.dtype.itemsize == 1:  # what torch says of 8 bits differs by version
        tensor = tensor.float()
    nan = torch.isnan(tensor)
    return int(nan.sum()), int((~torch.isfinite(tensor) & ~nan).sum())
