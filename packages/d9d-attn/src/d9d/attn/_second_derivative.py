"""Operations whose gradients have no gradient say so."""

import torch


def refuse_second_derivative() -> None:
    """Called in a backward pass, where gradients are recorded if and only if a graph of them was asked for.

    torch's ``once_differentiable`` is silent where the second derivative is taken of some inputs, or where the gradient
    of the result is a constant.

    Raises:
        RuntimeError: A graph of gradients was asked for.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "create_graph=True asks for a second derivative, which this operation has not; use fp64 for norms and "
            "rotations, and the attention backend 'eager'"
        )
