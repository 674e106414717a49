"""Functions that torch.compile calls while it traces, taking the result for a constant."""

from collections.abc import Callable
from typing import TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def constant(function: FunctionT) -> FunctionT:
    """Do as `torch.compiler.assume_constant_result`, without importing the whole compiler."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 - to type checkers functions have no such attribute
    return function
