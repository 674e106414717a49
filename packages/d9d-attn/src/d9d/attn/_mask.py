"""Which key a query may see.

Shapes: B batch, S queries, T keys, H query heads. The S queries are the last S of the T keys.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Documents:
    """Documents packed one after the other into a (B, S) batch, in the order of its flattened B·S positions.

    A document lies within one row. Positions from ``cu_seqlens[-1]`` on are padding: they see nothing,
    nothing sees them, and attention gives zeros there.
    """

    cu_seqlens: Tensor
    """int32, (documents + 1), on the device of the batch: where each document starts, and where the last one ends."""

    max_length: int
    """Length of the longest document, on the host."""

    @staticmethod
    def from_lengths(rows: Sequence[Sequence[int]], *, device: torch.device | str | None = None) -> "Documents":
        """Make documents from the lengths of those of each row; every row must be equally long.

        Raises:
            ValueError: A length is not positive, or the rows differ in their total length.
        """
        lengths = [length for row in rows for length in row]
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths must be positive and at least one, found {rows!r}")
        if len({sum(row) for row in rows}) > 1:
            raise ValueError(f"rows must be equally long, found {[sum(row) for row in rows]!r}; pad the last document")
        ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return Documents(ends.to(device), max(lengths))


@attrs.frozen
class Visibility:
    """A mask worked out for one shape."""

    keys: Tensor
    """bool, broadcastable to (B, H, S, T): the query may see the key. All True for a blind query, so that its softmax
    stays finite; its result is to be dropped."""

    blind: Tensor
    """bool, broadcastable to (B, H, S, 1): the query sees no key at all, and its output is zero."""


@attrs.frozen(kw_only=True, eq=False)
class AttentionMask:
    """All restrictions on what a query sees, in one value; a key is seen if every part allows it.

    Make one value per batch and pass it to all layers: what backends derive from it is kept with it.
    """

    causal: bool = True
    """A query sees keys up to its own position."""

    window: int | None = None
    """A query sees keys less than this many positions away (1: only itself)."""

    documents: Documents | None = None
    """A query sees keys of its own document."""

    bias: Tensor | None = None
    """Broadcastable to (B, H, S, T): bool (True may be seen), or a float added to the scaled scores (−inf hides)."""

    _known: dict[tuple[int, int, int, torch.device], Visibility] = attrs.field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"AttentionMask.window must be at least 1 or None, found {self.window!r}")
        if self.bias is not None and self.bias.dtype != torch.bool and not self.bias.is_floating_point():
            raise ValueError(f"AttentionMask.bias must be bool or floating, found {self.bias.dtype!r}; convert it")

    def is_plain(self, queries: int, keys: int) -> bool:
        """Whether the flag ``causal`` says all, in the usual meaning for as many queries as keys."""
        unrestricted = self.window is None and self.documents is None and self.bias is None
        return unrestricted and (queries == keys or not self.causal)

    @property
    def additive(self) -> Tensor | None:
        """The bias if it is one to add to the scores."""
        return self.bias if self.bias is not None and self.bias.is_floating_point() else None

    def visibility(self, *, batch: int, queries: int, keys: int, device: torch.device) -> Visibility:
        """Work out who sees whom, once per shape and device.

        Raises:
            ValueError: There are documents, but queries and keys are not the same positions.
        """
        shape = (batch, queries, keys, device)
        if shape not in self._known:
            # It is kept: made as an inference tensor, it would be refused by a later training step.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._known[shape] = self._compute(*shape)
        return self._known[shape]

    def _compute(self, batch: int, queries: int, keys: int, device: torch.device) -> Visibility:
        key_T = torch.arange(keys, device=device)
        distance_ST = torch.arange(keys - queries, keys, device=device)[:, None] - key_T
        visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
        if self.causal:
            visible = visible & (distance_ST >= 0)
        if self.window is not None:
            visible = visible & (distance_ST.abs() < self.window)
        if self.documents is not None:
            if queries != keys:
                raise ValueError(f"documents need as many queries as keys, found {queries!r} and {keys!r}")
            cu_seqlens = self.documents.cu_seqlens
            position_BS = torch.arange(batch * keys, device=device, dtype=cu_seqlens.dtype).view(batch, keys)
            document_BS = torch.searchsorted(cu_seqlens, position_BS, right=True)
            same = document_BS[:, :, None] == document_BS[:, None, :]
            real = position_BS < cu_seqlens[-1]
            visible = visible & (same & real[:, None, :])[:, None]
        if self.bias is not None:
            visible = visible & (self.bias if self.bias.dtype == torch.bool else self.bias != -torch.inf)
        blind = ~visible.any(-1, keepdim=True)
        return Visibility(visible | blind, blind)
