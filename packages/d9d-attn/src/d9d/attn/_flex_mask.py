"""A mask as flex attention takes it: a function of positions, and the blocks of positions to visit.

torch's create_block_mask asks the function about every pair of positions and sorts the blocks; compiled, that takes
minutes for some lengths (pytorch#182060). What a rule lets through of a pair of blocks follows from the first and last
position of each.

Shapes: B batch, H query heads, S queries, T keys, I blocks of queries, J blocks of keys; B and H are 1 where all are
alike.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._mask import AttentionMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128
"""What flex attention takes by default."""


class _Blocks(NamedTuple):
    """The positions of one dim, cut into blocks."""

    first: Tensor
    last: Tensor
    is_whole: Tensor


class _Rule(NamedTuple):
    """One part of a mask; what it says of blocks is bool and broadcastable to (B, H, I, J)."""

    sees: MaskFunction
    """Of batch, head, query and key."""

    some: Tensor
    """False only where no query of one block sees a key of the other. A visit in vain costs time alone."""

    every: Tensor
    """True only where each query of one block sees each key of the other; of blocks that are whole."""


def block_mask_of(
    mask: AttentionMask, *, batch: int, queries: int, keys: int, device: torch.device, heads: int | None = None
) -> "BlockMask | None":
    """Make it without waiting for the device, and keep it with the mask; None if all is seen.

    Raises:
        ValueError: The mask is of another shape, or on another device.
    """
    mask.check(batch=batch, queries=queries, keys=keys, device=device, heads=heads)

    def derive() -> "BlockMask | None":
        of_queries, of_keys = _cut(queries, device), _cut(keys, device)
        rules = list(_rules(mask, of_queries, of_keys, batch=batch, queries=queries, keys=keys))
        if not rules:
            return None
        full = (of_queries.is_whole[:, None] & of_keys.is_whole)[None, None]
        some = torch.ones_like(full)
        for rule in rules:
            some, full = some & rule.some, full & rule.every
        return _block_mask(some & ~full, full, _all_of([rule.sees for rule in rules]), (queries, keys))

    return mask.kept("blocks", (batch, queries, keys, device), derive)


def bias_at(bias: Tensor, *position: Tensor) -> Tensor:
    """An element of what is broadcastable to (B, H, S, T)."""
    last = position[len(position) - bias.ndim :]
    return bias[tuple(i if size > 1 else i * 0 for i, size in zip(last, bias.shape))]


def _cut(length: int, device: torch.device) -> _Blocks:
    first = torch.arange(0, length, BLOCK, device=device)
    end = first + BLOCK
    return _Blocks(first, end.clamp(max=length) - 1, end <= length)


def _rules(
    mask: AttentionMask, of_queries: _Blocks, of_keys: _Blocks, *, batch: int, queries: int, keys: int
) -> Iterator[_Rule]:
    offset = keys - queries
    # How far keys lie behind queries.
    nearest_IJ = of_queries.first[:, None] + offset - of_keys.last
    farthest_IJ = of_queries.last[:, None] + offset - of_keys.first
    if mask.causal:
        yield _Rule(lambda _b, _h, s, t: s + offset >= t, farthest_IJ >= 0, nearest_IJ >= 0)
    if (window := mask.window) is not None:
        yield _Rule(
            lambda _b, _h, s, t: (s + offset - t).abs() < window,
            (nearest_IJ < window) & (farthest_IJ > -window),
            (farthest_IJ < window) & (nearest_IJ > -window),
        )
    if mask.documents is not None:
        yield _same_document(mask.documents.index_positions(batch, keys))
    if (bias := mask.bias) is not None and bias.dtype == torch.bool:
        yield _Rule(lambda b, h, s, t: bias_at(bias, b, h, s, t), _fold(bias, torch.any), _fold(bias, torch.all))


def _same_document(document_BS: Tensor) -> _Rule:
    """A block may hold each document between its lowest and its highest one; padding is −1."""
    blocks = F.pad(document_BS, (0, -document_BS.shape[1] % BLOCK), value=-1).unflatten(1, (-1, BLOCK))
    lowest = blocks.masked_fill(blocks < 0, torch.iinfo(blocks.dtype).max).amin(-1)
    highest = blocks.amax(-1)
    only = highest.masked_fill(blocks.amin(-1) != highest, -1)
    return _Rule(
        lambda b, _h, s, t: (document_BS[b, s] == document_BS[b, t]) & (document_BS[b, t] >= 0),
        _of_pairs(torch.maximum, lowest) <= _of_pairs(torch.minimum, highest),
        (only[:, None, :, None] == only[:, None, None, :]) & (only >= 0)[:, None, None, :],
    )


def _of_pairs(function: Callable[[Tensor, Tensor], Tensor], x_BI: Tensor) -> Tensor:
    return function(x_BI[:, None, :, None], x_BI[:, None, None, :])


def _fold(bias: Tensor, fold: Callable[..., Tensor]) -> Tensor:
    """Blocks of a boolean bias, False beyond its end; what is broadcast stays so."""
    bias_BHST = bias[(None,) * (4 - bias.ndim)]
    for _ in range(2):  # keys, then queries
        if (length := bias_BHST.shape[-1]) > 1:
            padded = F.pad(bias_BHST, (0, -length % BLOCK), value=False)
            bias_BHST = fold(padded.unflatten(-1, (-1, BLOCK)), dim=-1)
        bias_BHST = bias_BHST.mT
    return bias_BHST


def _all_of(functions: list[MaskFunction]) -> MaskFunction:
    def sees(b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
        found = functions[0](b, h, s, t)
        for function in functions[1:]:
            found = found & function(b, h, s, t)
        return found

    return sees


def _block_mask(partial_BHIJ: Tensor, full_BHIJ: Tensor, sees: MaskFunction, lengths: tuple[int, int]) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 - takes a second to import

    return BlockMask(
        lengths,
        *_members(partial_BHIJ),
        *_members(full_BHIJ),
        *_members(partial_BHIJ.mT),
        *_members(full_BHIJ.mT),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
    )


def _members(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of (…, I, J): how many columns are chosen, and all columns with the chosen ones first; int32."""
    column = torch.arange(chosen.shape[-1], device=chosen.device).expand_as(chosen)
    chosen_so_far = chosen.cumsum(-1)
    count = chosen_so_far[..., -1:]
    place = torch.where(chosen, chosen_so_far - 1, count + column - chosen_so_far)
    ordered = torch.empty_like(place).scatter_(-1, place, column)
    return count[..., 0].int().contiguous(), ordered.int().contiguous()
