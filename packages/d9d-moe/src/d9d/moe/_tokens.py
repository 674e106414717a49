"""Whether tokens and their mask are what a router takes."""

import torch
from torch import Tensor


def check_tokens(x: Tensor, mask: Tensor | None, hidden_size: int) -> None:
    """Check shapes and dtypes, before broadcasting makes something else of them.

    Raises:
        ValueError: The last dim of x is not ``hidden_size``, or the mask is not bool, one for each token.
    """
    if x.shape[-1] != hidden_size:
        raise ValueError(f"tokens must have the size {hidden_size!r} in their last dim, found {tuple(x.shape)!r}")
    if mask is None:
        return
    if mask.shape != x.shape[:-1]:
        raise ValueError(
            f"the mask must have the shape {tuple(x.shape[:-1])!r} of the tokens, found {tuple(mask.shape)!r}"
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be torch.bool, False for padding, found {mask.dtype!r}; convert it by .bool()")
