"""One vector for a sequence.

Shapes: B sequences, S positions, H hidden size.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Pooling: TypeAlias = Literal["first", "last", "mean"]


def pool(hidden_BSH: Tensor, mask_BS: Tensor | None, pooling: Pooling) -> Tensor:
    """The first, the last or the mean (in at least fp32) of the positions that count; zeros where none does.

    Args:
        hidden_BSH: Any float dtype, which the result has as well.
        mask_BS: bool, true where a position counts, so that padding may lie anywhere; none: everywhere.
        pooling: Which.
    """
    if mask_BS is None:
        mask_BS = torch.ones(hidden_BSH.shape[:2], dtype=torch.bool, device=hidden_BSH.device)
    if mask_BS.shape != hidden_BSH.shape[:2] or mask_BS.dtype != torch.bool:
        raise ValueError(
            f"hidden of shape {tuple(hidden_BSH.shape)} needs a bool mask {tuple(hidden_BSH.shape[:2])}, "
            f"got {mask_BS.dtype} {tuple(mask_BS.shape)}"
        )
    if pooling == "mean":
        wide = torch.promote_types(hidden_BSH.dtype, torch.float32)
        total_BH = hidden_BSH.masked_fill(~mask_BS[..., None], 0.0).sum(1, dtype=wide)
        return (total_BH / mask_BS.sum(1, keepdim=True).clamp(min=1)).to(hidden_BSH.dtype)
    order_S = torch.arange(1, hidden_BSH.shape[1] + 1, device=hidden_BSH.device)
    score_BS = (order_S if pooling == "last" else order_S.flip(0)) * mask_BS
    chosen_B11 = score_BS.argmax(1)[:, None, None]
    rows_BH = hidden_BSH.gather(1, chosen_B11.expand(-1, 1, hidden_BSH.shape[2]))[:, 0]
    return rows_BH.masked_fill(~mask_BS.any(1, keepdim=True), 0.0)
