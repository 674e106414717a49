"""Operators of torch that cost next to nothing where nobody watches.

The same few lines stand in d9d.attn and d9d.moe, which share no package below them.
"""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


class Operator(Generic[ArgumentsP, ResultT]):
    """A function that is an operator to whatever records, replaces or transforms operators.

    That is torch.compile, fake and meta tensors, dispatch modes, functorch, other subclasses of Tensor, and autograd,
    which refuses an operator without a formula. All else calls the function itself: dispatch to a Python operator costs
    more than most of what ours do on the host, and its first call takes seconds, to import what only compilers need.
    """

    def __init__(self, name: str, function: Callable[ArgumentsP, ResultT], mutates_args: tuple[str, ...]) -> None:
        self._function = function
        self._operator: Any = torch.library.custom_op(name, function, mutates_args=mutates_args)
        self.register_fake = self._operator.register_fake
        self.register_autograd = self._operator.register_autograd

    def __call__(self, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs) -> ResultT:
        """Call one of the two; arguments are positional."""
        if not torch.compiler.is_compiling() and _nobody_watches(args):
            return self._function(*args, **kwargs)
        made: ResultT = self._operator(*args, **kwargs)
        return made


def operator(
    name: str, *, mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[ArgumentsP, ResultT]], Operator[ArgumentsP, ResultT]]:
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
