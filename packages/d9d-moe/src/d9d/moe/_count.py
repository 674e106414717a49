"""The count of tokens that each expert was given.

Shapes: T tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor

from ._operator import operator


# An operator, because a graph would keep what is so while it is traced: whether a forward is a recompute.
@operator("d9d::count_tokens", mutates_args=("load_E",))
def count_tokens(load_E: Tensor, ids_TK: Tensor, mask_T: Tensor | None) -> None:
    """Add to load_E (int64) the tokens given to each expert, except where the mask is False, and in recompute."""
    if is_recomputing():
        return
    ones_TK = torch.ones_like(ids_TK)
    if mask_T is not None:
        ones_TK *= mask_T[:, None]
    load_E.scatter_add_(0, ids_TK.flatten(), ones_TK.flatten())


@count_tokens.register_fake
def _(load_E: Tensor, ids_TK: Tensor, mask_T: Tensor | None) -> None:
    del load_E, ids_TK, mask_T


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as that of activation checkpointing does.

    torch has no public way to ask; torch.utils.checkpoint itself asks so.
    """
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001
