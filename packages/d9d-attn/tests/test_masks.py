"""What a mask hides, in rows without any key too; what it keeps and where it goes; and masks that are refused."""

import copy
import itertools
import pickle
import sys
from pathlib import Path

import pytest
import torch

from d9d.attn import AttentionBackendWithLSE, AttentionMask, Documents, Feature

sys.path.insert(0, str(Path(__file__).parent))
from attention_oracle import EAGER, TORCH, can, of_backends, oracle, values_and_gradients

torch.set_num_threads(1)


SEEING = torch.tensor([[False, False, True, True], [False, False, False, False]])  # left-padded; all padding
HIDDEN_BY = {
    "boolean bias": lambda dtype: {"bias": SEEING[:, None, None, :]},
    "additive bias": lambda dtype: {"bias": torch.where(SEEING, 0.0, -torch.inf)[:, None, None, :].to(dtype)},
    "documents": lambda dtype: {"documents": Documents(torch.tensor([2, 4], dtype=torch.int32), 2)},
}


def can_hide(config, hidden_by, has_sinks):
    mask = AttentionMask(**HIDDEN_BY[hidden_by](torch.float32))
    return can(config, *mask.features) and (not has_sinks or can(config, Feature.SINKS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@of_backends(("hidden_by", "has_sinks"), list(itertools.product(HIDDEN_BY, (False, True))), where=can_hide)
def test_rows_without_any_key_are_zero_and_have_no_nan_gradient(config, dtype, hidden_by, has_sinks):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 4, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 4, 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    mask = AttentionMask(**HIDDEN_BY[hidden_by](dtype))
    out = config.build()(q, k, v, mask, scale=1.0, sinks_H=sinks)
    assert out.dtype == dtype
    assert (out[~SEEING] == 0).all()
    assert (out[SEEING] != 0).any(-1).all()  # one element may be 0 in bf16
    inputs = (q, k, v, sinks) if has_sinks else (q, k, v)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()


def test_more_queries_than_keys_leave_the_first_without_any(config):
    q = torch.randn(2, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = config.build()(q, k, v, AttentionMask(), scale=1.0)
    assert (out[:, :2] == 0).all()
    assert (out[:, 2:] != 0).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, :2] == 0).all()


def test_packed_documents_equal_separate_sequences(config):
    backend = config.build()
    lengths = [[3, 5], [1, 7]]
    q, k, v = (torch.randn(2, 8, h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    packed = backend(q, k, v, AttentionMask(documents=Documents.from_lengths(lengths)), scale=0.5)
    parts = []
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            part = [x[row : row + 1, start : start + length] for x in (q, k, v)]
            parts.append(backend(*part, AttentionMask(), scale=0.5).squeeze(0))
            start += length
    separate = torch.cat(parts).view(packed.shape)
    upstream = torch.randn_like(packed)
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(packed, (q, k, v), upstream),
        torch.autograd.grad(separate, (q, k, v), upstream),
        rtol=1e-12,
        atol=1e-12,
    )


def test_a_mask_is_worked_out_once_per_shape():
    mask = AttentionMask(window=2)
    shape = {"batch": 1, "queries": 3, "keys": 3, "device": torch.device("cpu")}
    assert mask.visibility(**shape) is mask.visibility(**shape)
    assert mask.visibility(**shape).keys[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]


def test_a_mask_keeps_what_was_derived_for_the_last_shape_alone(config):
    backend, mask = config.build(), AttentionMask(window=2)
    for length in (5, 3, 6, 3):
        q = torch.randn(1, length, 2, 8)
        torch.testing.assert_close(
            backend(q, q, q, mask, scale=1.0), EAGER(q, q, q, AttentionMask(window=2), scale=1.0)
        )
    assert len(mask._known) <= 1


def test_positions_before_the_first_document_are_padding(config):
    mask = AttentionMask(documents=Documents(torch.tensor([3, 4, 4, 6, 8, 10], dtype=torch.int32), 2))
    q, k, v = (torch.randn(2, 6, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    upstream = torch.randn_like(q)
    found = values_and_gradients(lambda *x: config.build()(*x, mask, scale=0.5), (q, k, v), upstream)
    parts = [(0, 3, 4), (0, 4, 6), (1, 0, 2), (1, 2, 4)]
    same = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    for row, start, end in parts:
        same[row, :, start:end, start:end] = True
    expected = values_and_gradients(lambda *x: oracle(*x, AttentionMask(bias=same), 0.5)[0], (q, k, v), upstream)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("lengths", [(0, 3, 3), (1, 0, 0), (1, 0, 3), (1, 3, 0)])
def test_nothing_to_attend_is_no_error(config, lengths):
    batch, queries, keys = lengths
    q = torch.randn(batch, queries, 4, 8, requires_grad=True)
    k, v = (torch.randn(batch, keys, 2, dim, requires_grad=True) for dim in (8, 6))
    for mask in (AttentionMask(), AttentionMask(causal=False), AttentionMask(window=2)):
        out = config.build()(q, k, v, mask, scale=1.0)
        assert out.shape == (batch, queries, 4, 6)
        assert (out == 0).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_mask_of_another_shape_says_so(config):
    backend = config.build()
    q, k = torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 2, 8)
    for lengths, found in (([[10]], "10"), ([[5, 5, 5]] * 2, "30")):
        mask = AttentionMask(documents=Documents.from_lengths(lengths))
        with pytest.raises(ValueError, match=f"documents of {found} positions.* do not fit into 2 rows of 5"):
            backend(q, k, k, mask, scale=1.0)
    if not can(config, Feature.BOOLEAN_BIAS):
        return
    for shape in ((2, 5), (3, 1, 5, 5), (2, 1, 1, 6), (1, 1, 2, 1, 5), (2, 2, 5, 5), (3, 1, 5)):
        for dtype in (torch.bool, torch.float32):
            mask = AttentionMask(bias=torch.ones(shape, dtype=dtype))
            with pytest.raises(ValueError, match=r"not broadcastable to \(2, 4, 5, 5\)"):
                backend(q, k, k, mask, scale=1.0)


def test_a_mask_that_was_used_travels(config):
    backend, mask = config.build(), AttentionMask(documents=Documents.from_lengths([[2, 3]]))
    q = torch.randn(1, 5, 2, 8)
    expected = backend(q, q, q, mask, scale=1.0)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert torch.equal(backend(q, q, q, other, scale=1.0), expected)
        assert other.documents.cu_seqlens is not mask.documents.cu_seqlens


def test_a_mask_on_another_device_says_so(config):
    q = torch.zeros(1, 5, 2, 8, device="meta")
    parts = [{"documents": Documents.from_lengths([[5]])}]
    if can(config, Feature.BOOLEAN_BIAS):
        parts.append({"bias": torch.ones(5, dtype=torch.bool)})
    for part in parts:
        with pytest.raises(ValueError, match=r"is on 'cpu', but the queries are on 'meta'; make the mask there"):
            config.build()(q, q, q, AttentionMask(**part), scale=1.0)


def test_a_mask_of_an_evaluation_serves_training(config):
    backend, mask = config.build(), AttentionMask(window=2)
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.inference_mode():
        backend(q, q, q, mask, scale=1.0)
    backend(q, q, q, mask, scale=1.0).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("mask", [None, torch.ones(3, 3, dtype=torch.bool)], ids=["None", "tensor"])
def test_what_is_no_mask_says_what_to_give(config, mask):
    backend = config.build()
    x = torch.randn(1, 3, 2, 8)
    message = rf"found {type(mask).__name__}; give AttentionMask\(\)"
    with pytest.raises(TypeError, match=message):
        backend(x, x, x, mask, scale=1.0)
    if isinstance(backend, AttentionBackendWithLSE):
        with pytest.raises(TypeError, match=message):
            backend.with_lse(x, x, x, mask, scale=1.0)


def test_bad_masks_say_what_is_wrong():
    with pytest.raises(ValueError, match="window must be at least 1 or None, found 0"):
        AttentionMask(window=0)
    with pytest.raises(ValueError, match="bias must be bool or floating, found torch.int64"):
        AttentionMask(bias=torch.ones(1, 1, 2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rows must be equally long, found \[3, 4\]"):
        Documents.from_lengths([[3], [4]])
    with pytest.raises(ValueError, match="must be positive"):
        Documents.from_lengths([[3, 0]])
    with pytest.raises(TypeError, match=r"come in rows, as \[\[3, 5\]\] for one row of 8 positions, found \[3, 4\]"):
        Documents.from_lengths([3, 4])
    with pytest.raises(TypeError, match=r"must be Documents, as of Documents.from_lengths, found \[\[3, 4\]\]"):
        AttentionMask(documents=[[3, 4]])
    with pytest.raises(TypeError, match=r"bias must be a tensor, found \[\[True\]\]"):
        AttentionMask(bias=[[True]])
    with pytest.raises(ValueError, match="cu_seqlens must be int32 .*, found torch.int64"):
        Documents(torch.tensor([0, 3]), 3)
    with pytest.raises(ValueError, match=r"cu_seqlens must be int32 .*, found torch.int32 of \(0,\)"):
        Documents(torch.tensor([], dtype=torch.int32), 0)
    mask = AttentionMask(documents=Documents.from_lengths([[3]]))
    with pytest.raises(ValueError, match="as many queries as keys, found 1 and 3"):
        EAGER(torch.zeros(1, 1, 1, 2), torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2), mask, scale=1.0)
    with pytest.raises(ValueError, match=r"a value for each key, found keys of the shape \(1, 3, 1, 2\)"):
        TORCH(*[torch.zeros(1, 3, 1, 2)] * 2, torch.zeros(1, 2, 1, 2), AttentionMask(), scale=1.0)
    with pytest.raises(ValueError, match="'torch' has no sinks and no soft cap; use 'flex' or 'eager'"):
        TORCH(*[torch.zeros(1, 1, 1, 2)] * 3, AttentionMask(), scale=1.0, sinks_H=torch.zeros(1))
