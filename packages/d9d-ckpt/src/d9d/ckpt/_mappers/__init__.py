"""Leaves and composites of the state graph."""

from ._apply import Apply
from ._cast import Cast, Dequantize
from ._compose import Parallel, Sequential
from ._concatenate import Chunk, Concatenate
from ._constant import Constant, Drop
from ._dims import Squeeze, Transpose, Unsqueeze
from ._rename import Identity, Rename
from ._reshape import Reshape
from ._scope import Prefix, Repeat, SelectChild
from ._shard import Shard
from ._slice import Slice
from ._stack import Stack, Unstack
from ._tie import Tie, Untie

__all__ = [
    "Apply",
    "Cast",
    "Chunk",
    "Concatenate",
    "Constant",
    "Dequantize",
    "Drop",
    "Identity",
    "Parallel",
    "Prefix",
    "Rename",
    "Repeat",
    "Reshape",
    "Sequential",
    "Shard",
    "SelectChild",
    "Slice",
    "Squeeze",
    "Stack",
    "Tie",
    "Transpose",
    "Unsqueeze",
    "Unstack",
    "Untie",
]
