"""Blocks that flex attention visits, against torch asking the mask for every pair of positions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.attn import AttentionMask, Documents
from d9d.attn._flex_mask import BLOCK, block_mask_of

CPU = torch.device("cpu")
LENGTHS = st.sampled_from([1, 127, 128, 129, 300, 512])


@st.composite
def masks(draw):
    """(mask, batch, queries, keys)"""
    batch, keys = draw(st.integers(1, 2)), draw(LENGTHS)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    queries, documents, bias = keys, None, None
    if draw(st.booleans()):
        ends = torch.randint(1, batch * keys + 1, (draw(st.integers(1, 6)),), generator=generator)
        rows = torch.arange(1, batch) * keys  # a document lies within one row
        starts = torch.cat([torch.tensor([0]), ends, rows[rows < ends.max()]]).sort().values.unique().int()
        if len(starts) > 2 and draw(st.booleans()):
            starts = starts[1:]  # padding comes first
        documents = Documents(starts, int(starts.diff().max()))
    else:
        queries = min(keys, draw(LENGTHS))
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in (batch, 3, queries, keys)]
        bias = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.001, 0.5, 0.999]))
        bias[..., : BLOCK + 5] |= draw(st.booleans())
        bias = bias[0] if bias.shape[0] == 1 and draw(st.booleans()) else bias
    window = draw(st.none() | st.sampled_from([1, 60, 128, 200, 600]))
    return (
        AttentionMask(causal=draw(st.booleans()), window=window, documents=documents, bias=bias),
        batch,
        queries,
        keys,
    )


def dense(count, index):
    return torch.zeros(index.shape, dtype=torch.bool).scatter_(
        -1, index.long(), torch.arange(index.shape[-1]) < count[..., None]
    )


@settings(deadline=None, max_examples=60)
@given(masks())
def test_blocks_are_those_of_the_pairs(problem):
    mask, batch, queries, keys = problem
    found = block_mask_of(mask, batch=batch, queries=queries, keys=keys, device=CPU)
    pairs = mask.visibility(batch=batch, queries=queries, keys=keys, device=CPU)
    if found is None:
        assert pairs.keys.all()
        return
    visible = (pairs.keys & ~pairs.blind).expand(batch, -1, queries, keys)
    heads = visible.shape[1]
    padded = torch.nn.functional.pad(visible, (0, -keys % BLOCK, 0, -queries % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-3, -2)
    some, every = blocks.flatten(-2).any(-1), blocks.flatten(-2).all(-1)

    partial, full = dense(found.kv_num_blocks, found.kv_indices), dense(found.full_kv_num_blocks, found.full_kv_indices)
    assert torch.equal(full.expand(batch, heads, *full.shape[2:]), every)
    assert not (partial & full).any()
    visited = (partial | full).expand_as(some)
    assert (visited | ~some).all()  # nothing that is seen is left out
    if mask.bias is None and mask.documents is None:
        assert torch.equal(visited, some)
    assert torch.equal(dense(found.q_num_blocks, found.q_indices), partial.mT)
    assert torch.equal(dense(found.full_q_num_blocks, found.full_q_indices), full.mT)

    b, h, s, t = (torch.arange(n) for n in (batch, heads, queries, keys))
    told = found.mask_mod(b[:, None, None, None], h[:, None, None], s[:, None], t)
    assert torch.equal(told.expand_as(visible), visible)


def test_far_documents_are_not_visited():
    mask = AttentionMask(documents=Documents.from_lengths([[2 * BLOCK] * 4]))
    found = block_mask_of(mask, batch=1, queries=8 * BLOCK, keys=8 * BLOCK, device=CPU)
    visited = dense(found.kv_num_blocks, found.kv_indices) | dense(found.full_kv_num_blocks, found.full_kv_indices)
    assert torch.equal(visited[0, 0], torch.block_diag(*[torch.ones(2, 2).tril()] * 4).bool())
