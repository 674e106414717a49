"""Leaves and composites of the state graph."""

from ._compose import Parallel, Prefix, Sequential
from ._concatenate import Chunk, Concatenate
from ._rename import Identity, Rename, Transpose
from ._stack import Stack, Unstack

__all__ = [
    "Chunk",
    "Concatenate",
    "Identity",
    "Parallel",
    "Prefix",
    "Rename",
    "Sequential",
    "Stack",
    "Transpose",
    "Unstack",
]
