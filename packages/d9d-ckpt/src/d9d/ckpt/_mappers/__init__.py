"""Leaves and composites of the state graph."""

from d9d.ckpt._mappers._compose import Parallel, Prefix, Sequential
from d9d.ckpt._mappers._concatenate import Chunk, Concatenate
from d9d.ckpt._mappers._rename import Identity, Rename, Transpose
from d9d.ckpt._mappers._stack import Stack, Unstack

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
