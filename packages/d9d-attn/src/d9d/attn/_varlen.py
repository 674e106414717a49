"""A mask as sequences of their own lengths, for kernels that take these and no mask.

Shapes as in AttentionBackend; N the B·S positions of the batch one after the other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._mask import AttentionMask


class Sequences(NamedTuple):
    """Where each sequence lies among the flattened positions."""

    cu_queries: Tensor
    """int32, (sequences + 1)."""

    cu_keys: Tensor
    """Likewise; the same tensor if queries and keys are the same positions, which some kernels ask for."""

    max_queries: int
    """Length of the longest, on the host."""

    max_keys: int
    """Likewise."""

    real_BS: Tensor | None
    """bool: the position is in a sequence. Kernels leave the others as they find them. None: all are, or may be."""

    def flatten(self, x: Tensor) -> Tensor:
        """(B, S, …) to (N, …); a gradient of positions outside all sequences is dropped."""
        return self.drop_padding(x).flatten(0, 1)

    def unflatten(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """(N, …) to (B, S, …), with zeros outside all sequences."""
        return self.drop_padding(x.unflatten(0, shape))

    def drop_padding(self, x: Tensor) -> Tensor:
        """Set what lies outside all sequences to zero, even NaN, in its gradient too."""
        if self.real_BS is None:
            return x
        return torch.where(self.real_BS.view(*self.real_BS.shape, *[1] * (x.ndim - 2)), x, x.new_zeros(()))

    def fill_padding_lse(self, lse_BHS: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Say outside all sequences what is said of a query without keys: the sink, or −inf."""
        if self.real_BS is None:
            return lse_BHS
        empty = lse_BHS.new_full((), -torch.inf) if sinks_H is None else sinks_H.to(lse_BHS.dtype)[:, None]
        return torch.where(self.real_BS[:, None], lse_BHS, empty)


def sequences_of(mask: AttentionMask, *, batch: int, queries: int, keys: int, device: torch.device) -> Sequences:
    """The documents of the mask, or the rows of the batch if it has none; kept with the mask.

    Raises:
        ValueError: The mask is of another shape, or on another device.
    """
    mask.check(batch=batch, queries=queries, keys=keys, device=device)

    def derive() -> Sequences:
        if (documents := mask.documents) is not None:
            real_BS = None
            if not _are_equal(documents.total_length, batch * queries):
                real_BS = documents.index_positions(batch, queries) >= 0
            cu_seqlens = documents.cu_seqlens
            return Sequences(cu_seqlens, cu_seqlens, documents.max_length, documents.max_length, real_BS)
        row = torch.arange(batch + 1, device=device, dtype=torch.int32)
        cu_queries = row * queries
        return Sequences(cu_queries, cu_queries if queries == keys else row * keys, queries, keys, None)

    return mask.kept("sequences", (batch, queries, keys, device), derive)


def _are_equal(total: int | None, positions: int) -> bool:
    """False of a constant and of what torch.compile leaves open: comparing them would fix both."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value  # noqa: PLC0415 - takes a second to import

        if total is None or has_static_value(total) != has_static_value(positions):
            return False
    return total == positions


def window_bounds(mask: AttentionMask) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; None is all of them."""
    reach = None if mask.window is None else mask.window - 1
    return reach, 0 if mask.causal else reach
