"""Rows grouped by destination, and the moves between tokens and rows.

A token goes to several destinations (experts, or ranks) and has one row at each. ``gather_rows`` copies tokens to their
rows, ``sum_rows`` adds the rows of each token; each is the other's gradient. Sums accumulate in fp32 or wider, in the
order of a token's slots: no atomics, the same bits every time.
"""

from ._index import RowIndex, group_by_destination
from ._moves import gather_rows, gather_rows_into, gather_rows_with_probs, sum_rows
from ._ranks import ranks_of_tokens

__all__ = [
    "RowIndex",
    "gather_rows",
    "gather_rows_into",
    "gather_rows_with_probs",
    "group_by_destination",
    "ranks_of_tokens",
    "sum_rows",
]
