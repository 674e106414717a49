"""Programs as tables of text, in the format of torch.distributed.pipelining: a row a rank, a cell an action."""

import csv
import io
import re

from ._action import COMPUTE, Action
from ._program import Program

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_WAIT = re.compile(r"\d+WAIT_(SEND_F|SEND_B|REDUCE_GRAD)\d*")


def to_csv(program: Program) -> str:
    """Write a program in torch's format.

    Torch reads ``program.computations()`` as its ``compute_only`` format, and derives the rest its own way. To its
    ``compute_comms`` format late versions add WAIT cells, which a program of ours does not have.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(program.actions)
    return text.getvalue()


def from_csv(text: str) -> Program:
    """Read what `to_csv` or torch wrote; a stage lives where its forwards run.

    Torch's empty cells mean nothing, its WAIT cells neither, as whoever posts a transfer here also waits for it. The
    parts of an OVERLAP_F_B run one after the other.

    Raises:
        ValueError: If a cell is no action (names row and column), or stages or microbatches are not numbered without
            gaps, or run on two ranks.
    """
    rows = [
        tuple(action for column, cell in enumerate(cells) for action in _parse(cell, row, column))
        for row, cells in enumerate(csv.reader(io.StringIO(text)))
    ]
    computations = [(rank, action) for rank, row in enumerate(rows) for action in row if action.op in COMPUTE]
    places = sorted({(action.stage, rank) for rank, action in computations})
    microbatches = sorted({action.microbatch for _, action in computations if action.microbatch is not None})
    stages = [stage for stage, _ in places]
    if stages != list(range(len(stages))) or microbatches != list(range(len(microbatches))):
        raise ValueError(
            f"stages and microbatches are to be numbered from 0, each stage on one rank; found "
            f"(stage, rank) {places!r}, microbatches {microbatches!r}"
        )
    return Program(tuple(rank for _, rank in places), len(microbatches), tuple(rows))


def _parse(cell: str, row: int, column: int) -> list[Action]:
    cell = cell.strip()
    if not cell or _WAIT.fullmatch(cell):
        return []
    overlap = _OVERLAP.fullmatch(cell)
    try:
        return [Action.parse(part) for part in (overlap[1].split(";") if overlap else [cell])]
    except ValueError as error:
        raise ValueError(f"row {row!r}, column {column!r}: {error}") from None
