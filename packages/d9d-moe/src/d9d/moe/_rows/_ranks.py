"""Which ranks a token goes to.

Shapes: T tokens, K experts per token, P ranks.
"""

import torch
from torch import Tensor

from .._triton import has_kernels_on


def ranks_of_tokens(ids_TK: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """List each token's ranks once, and count for each rank the tokens and the slots it gets.

    Args:
        ids_TK: Experts; those from ``experts · ranks`` on are on no rank.
        experts: Of each rank.
        ranks: Number of ranks.

    Returns:
        Integers (T, P), of which number p is p if the token goes to rank p, else P; and int64 (P, 2), tokens and slots.
    """
    if has_kernels_on(ids_TK):
        from . import _launch  # noqa: PLC0415 - Triton comes with torch for CUDA only

        return _launch.ranks_of_tokens(ids_TK, experts, ranks)
    every_P = torch.arange(ranks, device=ids_TK.device)
    slots_TP = (ids_TK[..., None] // experts == every_P).sum(1)
    return every_P.where(slots_TP > 0, ranks), torch.stack([(slots_TP > 0).sum(0), slots_TP.sum(0)], dim=1)
