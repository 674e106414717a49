"""Operators of torch that cost next to nothing where nobody watches.

The same few lines stand in d9d.attn and d9d.moe, which share no package below them.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

ResultT = TypeVar("ResultT")


class Operator(Generic[ResultT]):
    """A function that is an operator to whatever records, replaces or transforms operators.

    That is torch.compile, fake and meta tensors, dispatch modes, functorch, other subclasses of Tensor, and autograd,
    which refuses an operator without a formula. All else calls the function itself: dispatch to a Python operator costs
    more than most of what ours do on the host, and its first call takes seconds, to import what only compilers need.

    Attributes:
        registered: The operator itself.
    """

    def __init__(self, name: str, function: Callable[..., ResultT], mutates_args: tuple[str, ...]) -> None:
        self._function = function
        self.registered: Any = torch.library.custom_op(name, function, mutates_args=mutates_args)
        self.register_fake = self.registered.register_fake
        self.register_autograd = self.registered.register_autograd

    def __call__(self, *args: Any) -> ResultT:
        """Call one of the two."""
        if not torch.compiler.is_compiling() and _nobody_watches(args):
            return self._function(*args)
        made: ResultT = self.registered(*args)
        return made


def operator(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., ResultT]], Operator[ResultT]]:
    """Make a function, as `torch.library.custom_op` wants it, an operator."""
    return lambda function: Operator(name, function, mutates_args)


def _nobody_watches(args: tuple[object, ...]) -> bool:
    # torch has no public way to ask for either.
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        return False
    records = torch.is_grad_enabled()
    for x in args:
        if isinstance(x, Tensor) and (
            (type(x) is not Tensor and type(x) is not nn.Parameter) or x.is_meta or (records and x.requires_grad)
        ):
            return False
    return True
