"""Rows grouped by destination, and the moves between tokens and rows.

A token goes to several destinations (experts, or ranks) and has one row at each. ``gather_rows`` copies tokens to their
rows, ``sum_rows`` adds the rows of each token; each is the other's gradient. Sums accumulate in fp32 or wider, in the
order of a token's slots: no atomics, the same bits every time.
"""

from ._index import RowIndex, group_by_destination, group_operator
from ._moves import (
    gather_operator,
    gather_rows,
    gather_rows_with_probs,
    pack_rows,
    sum_operator,
    sum_rows,
    sum_rows_into,
)
from ._ranks import ranks_of_tokens

__all__ = [
    "RowIndex",
    "gather_operator",
    "gather_rows",
    "gather_rows_with_probs",
    "group_by_destination",
    "group_operator",
    "pack_rows",
    "ranks_of_tokens",
    "sum_operator",
    "sum_rows",
    "sum_rows_into",
]
