"""Which key a query may see.

Shapes: B batch, S queries, T keys, H query heads. The S queries are the last S of the T keys.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import attrs
import torch
from torch import Tensor

from ._feature import Feature

DerivedT = TypeVar("DerivedT")
_NOTHING = object()


def _check_starts(_: object, attribute: "attrs.Attribute[Tensor]", value: Tensor) -> None:
    if value.ndim != 1 or value.dtype != torch.int32 or not len(value):
        raise ValueError(
            f"Documents.{attribute.name} must be int32 of the shape (documents + 1,), found {value.dtype} of "
            f"{tuple(value.shape)!r}"
        )


@attrs.frozen(eq=False)
class Documents:
    """Documents packed one after the other into a (B, S) batch, in the order of its flattened B·S positions.

    A document lies within one row. Positions before ``cu_seqlens[0]`` and from ``cu_seqlens[-1]`` on are padding: they
    see nothing, nothing sees them, and attention gives zeros there.
    """

    cu_seqlens: Tensor = attrs.field(validator=_check_starts)
    """int32, (documents + 1), on the device of the batch: where each document starts, and where the last one ends."""

    max_length: int
    """Length of the longest document, on the host."""

    total_length: int | None = None
    """``cu_seqlens[-1]`` on the host, if known and ``cu_seqlens[0]`` is 0: kernels of variable length
    then need not expect padding."""

    @staticmethod
    def from_lengths(rows: Sequence[Sequence[int]], *, device: torch.device | str | None = None) -> "Documents":
        """Make documents from the lengths of those of each row; every row must be equally long.

        Raises:
            ValueError: A length is not positive, or the rows differ in their total length.
            TypeError: A row is one length.
        """
        if any(isinstance(row, int) for row in rows):
            raise TypeError(f"document lengths come in rows, as [[3, 5]] for one row of 8 positions, found {rows!r}")
        lengths = [length for row in rows for length in row]
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths must be positive and at least one, found {rows!r}")
        if len({sum(row) for row in rows}) > 1:
            raise ValueError(f"rows must be equally long, found {[sum(row) for row in rows]!r}; pad the last document")
        ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return Documents(ends.to(device), max(lengths), sum(lengths))

    def index_positions(self, batch: int, length: int) -> Tensor:
        """Number of the document that holds each position, (B, S) int64; −1 in padding."""
        position_BS = torch.arange(batch * length, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        position_BS = position_BS.view(batch, length)
        index_BS = torch.searchsorted(self.cu_seqlens, position_BS, right=True) - 1
        return index_BS.masked_fill(position_BS >= self.cu_seqlens[-1], -1)


class Visibility(NamedTuple):
    """A mask worked out for one shape."""

    keys: Tensor
    """bool, broadcastable to (B, H, S, T): the query may see the key. All True for a blind query, so that its softmax
    stays finite; its result is to be dropped."""

    blind: Tensor
    """bool, broadcastable to (B, H, S, 1): the query sees no key at all, and its output is zero."""


@attrs.frozen(kw_only=True, eq=False, init=False)
class AttentionMask:
    """All restrictions on what a query sees, in one value; a key is seen if every part allows it.

    Make one value per batch and pass it to all layers: what backends derive from it is kept with it, for the last shape
    asked for. Do not write into its tensors.

    Raises:
        ValueError: The window is below 1, or the bias neither bool nor floating.
        TypeError: The documents are no Documents, or the bias is no tensor.
    """

    causal: bool = True
    """A query sees keys up to its own position."""

    window: int | None = None
    """A query sees keys less than this many positions away (1: only itself)."""

    documents: Documents | None = None
    """A query sees keys of its own document."""

    bias: Tensor | None = None
    """Broadcastable to (B, H, S, T): bool (True may be seen), or a float added to the scaled scores (−inf hides)."""

    _known: dict[str, tuple[Hashable, Any]] = attrs.field(factory=dict, init=False, repr=False)

    # Spelled out because torch.compile cannot follow the one that attrs writes for a frozen class.
    def __init__(
        self,
        *,
        causal: bool = True,
        window: int | None = None,
        documents: Documents | None = None,
        bias: Tensor | None = None,
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"AttentionMask.window must be at least 1 or None, found {window!r}")
        if documents is not None and not isinstance(documents, Documents):
            raise TypeError(
                f"AttentionMask.documents must be Documents, as of Documents.from_lengths, found {documents!r}"
            )
        if bias is not None and not isinstance(bias, Tensor):
            raise TypeError(f"AttentionMask.bias must be a tensor, found {bias!r}")
        if bias is not None and bias.dtype != torch.bool and not bias.is_floating_point():
            raise ValueError(f"AttentionMask.bias must be bool or floating, found {bias.dtype!r}; convert it")
        object.__setattr__(self, "causal", causal)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "bias", bias)
        object.__setattr__(self, "_known", {})

    def __reduce__(self) -> tuple[Callable[..., "AttentionMask"], tuple[object, ...]]:
        """A copy derives anew: what backends made may hold functions, which do not travel."""
        return _make_mask, (self.causal, self.window, self.documents, self.bias)

    def is_plain(self, queries: int, keys: int) -> bool:
        """Whether the flag ``causal`` says all, in the usual meaning for as many queries as keys."""
        unrestricted = self.window is None and self.documents is None and self.bias is None
        return unrestricted and (queries == keys or not self.causal)

    @property
    def additive(self) -> Tensor | None:
        """The bias if it is one to add to the scores."""
        return self.bias if self.bias is not None and self.bias.is_floating_point() else None

    @property
    def features(self) -> tuple[Feature, ...]:
        """What it asks of a backend."""
        found = []
        if self.window is not None:
            found.append(Feature.WINDOW)
        if self.documents is not None:
            found.append(Feature.DOCUMENTS)
        if self.bias is not None:
            found.append(Feature.BOOLEAN_BIAS if self.bias.dtype == torch.bool else Feature.ADDITIVE_BIAS)
            if self.bias.requires_grad:
                found.append(Feature.BIAS_GRADIENT)
        return tuple(found)

    def within(self, window: int | None) -> "AttentionMask":
        """This mask with a window no wider than the one given; one value, so that layers share what is derived."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return self.kept(
            f"within {window}",
            None,
            lambda: AttentionMask(causal=self.causal, window=window, documents=self.documents, bias=self.bias),
        )

    def kept(self, name: str, shape: Hashable, derive: Callable[[], DerivedT]) -> DerivedT:
        """What ``derive`` makes of this mask, kept with it until it is asked for in another shape.

        torch.compile sees the making in each layer, and finds that they are the same.
        """
        if torch.compiler.is_compiling():
            return derive()
        made_for, derived = self._known.get(name, (_NOTHING, None))
        if made_for != shape:
            # It is kept: made as an inference tensor, it would be refused by a later training step.
            with torch.inference_mode(mode=False), torch.no_grad():
                derived = derive()
            self._known[name] = shape, derived
        found: DerivedT = derived
        return found

    def visibility(
        self, *, batch: int, queries: int, keys: int, device: torch.device, heads: int | None = None
    ) -> Visibility:
        """Work out who sees whom, once per shape and device.

        Raises:
            ValueError: The mask is of another shape, or on another device.
        """
        self.check(batch=batch, queries=queries, keys=keys, device=device, heads=heads)
        return self.kept(
            "visibility", (batch, queries, keys, device), lambda: self._compute(batch, queries, keys, device)
        )

    def check(self, *, batch: int, queries: int, keys: int, device: torch.device, heads: int | None = None) -> None:
        """Refuse a mask of another shape, as far as the host knows shapes, or on another device.

        Raises:
            ValueError: There are documents, but queries and keys are not the same positions; the documents do not fit
                in, or the bias is not broadcastable; a tensor of the mask is elsewhere.
        """
        starts = None if self.documents is None else self.documents.cu_seqlens
        for name, tensor in (("documents.cu_seqlens", starts), ("bias", self.bias)):
            if tensor is not None and tensor.device != device:
                raise ValueError(
                    f"AttentionMask.{name} is on {str(tensor.device)!r}, but the queries are on {str(device)!r}; "
                    "make the mask there, as by Documents.from_lengths(rows, device=x.device)"
                )
        if (documents := self.documents) is not None:
            if queries != keys:
                raise ValueError(f"documents need as many queries as keys, found {queries!r} and {keys!r}")
            total = documents.total_length
            if documents.max_length > keys or (total is not None and total > batch * keys):
                raise ValueError(
                    f"documents of {total!r} positions, the longest of {documents.max_length!r}, do not fit into "
                    f"{batch!r} rows of {keys!r}; make documents for this very batch"
                )
        if (bias := self.bias) is not None:
            expected = {-4: batch, -2: queries, -1: keys} | ({} if heads is None else {-3: heads})
            if bias.ndim > 4 or any(-dim <= bias.ndim and bias.shape[dim] not in (1, n) for dim, n in expected.items()):
                raise ValueError(
                    f"AttentionMask.bias has the shape {tuple(bias.shape)!r}, which is not broadcastable to "
                    f"({batch!r}, {heads or 'heads'}, {queries!r}, {keys!r}); a mask of keys is (batch, 1, 1, keys)"
                )

    def _compute(self, batch: int, queries: int, keys: int, device: torch.device) -> Visibility:
        key_T = torch.arange(keys, device=device)
        distance_ST = torch.arange(keys - queries, keys, device=device)[:, None] - key_T
        visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
        if self.causal:
            visible = visible & (distance_ST >= 0)
        if self.window is not None:
            visible = visible & (distance_ST.abs() < self.window)
        if self.documents is not None:
            document_BS = self.documents.index_positions(batch, keys)
            same = document_BS[:, :, None] == document_BS[:, None, :]
            visible = visible & (same & (document_BS >= 0)[:, None, :])[:, None]
        if self.bias is not None:
            bias = self.bias.detach()
            visible = visible & (bias if bias.dtype == torch.bool else bias != -torch.inf)
        blind = ~visible.any(-1, keepdim=True)
        return Visibility(visible | blind, blind)


def require_mask(mask: object) -> None:
    """Raises a TypeError for None or a tensor, with which others say who sees whom."""
    if not isinstance(mask, AttentionMask):
        raise TypeError(
            f"mask must be an AttentionMask, found {type(mask).__name__}; give AttentionMask(), by which a query sees "
            "keys up to its own, AttentionMask(causal=False), by which it sees all, or AttentionMask(causal=False, "
            "bias=tensor)"
        )


def _make_mask(causal: bool, window: int | None, documents: Documents | None, bias: Tensor | None) -> AttentionMask:  # noqa: FBT001
    return AttentionMask(causal=causal, window=window, documents=documents, bias=bias)
