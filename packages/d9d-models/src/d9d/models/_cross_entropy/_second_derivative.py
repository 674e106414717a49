"""What cannot be differentiated twice says so."""

import torch


def refuse_second_derivative() -> None:
    """Called in a backward pass, where gradients are recorded if and only if a graph of them was asked for.

    Raises:
        RuntimeError: It was; nothing else would tell that these gradients are constants to autograd.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the loss of a head has no second derivative, and create_graph=True asks for one: "
            "leave it out, or take torch.nn.functional.cross_entropy of all logits"
        )
