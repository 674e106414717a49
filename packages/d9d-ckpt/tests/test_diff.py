"""Differences between checkpoints, against torch on whole tensors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from d9d.ckpt import JobCheckpoints, Source, TensorSpec, diff, open_checkpoint
from d9d.ckpt._dtypes import DTYPES
from d9d.ckpt._tiles import tiles


class Held(Source):
    """Tensors in memory, which counts the largest region read."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.largest = 0

    def __getitem__(self, name):
        return TensorSpec.of(self.tensors[name])

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)

    def read(self, region):
        self.largest = max(self.largest, region.numel)
        return self.tensors[region.name][region.slices]

    def file(self, name):
        return name


NAN, INF = math.nan, math.inf


def one(a, b, **options):
    """The difference of two tensors, None where there is none."""
    found = diff(Held(x=a), Held(x=b), **options)
    assert found.equal == 1 - len(found.tensors)
    return found.tensors[0] if found.tensors else None


def bits(*words):
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_names_shapes_and_dtypes():
    a = Held(a=torch.ones(2), b=torch.ones(2), c=torch.ones(2), d10=torch.ones(1), d9=torch.ones(1))
    b = Held(b=torch.ones(3), c=torch.ones(2).half(), d1=torch.ones(1), d9=torch.ones(1))
    found = diff(a, b)
    assert not found.same
    assert (found.only_left, found.only_right, found.equal) == (("a", "d10"), ("d1",), 1)
    assert [str(tensor) for tensor in found.tensors] == [
        "'b' is [2] float32 and [3] float32",
        "'c' is [2] float32 and [2] float16",
    ]
    assert "only in the first: 'd10' (nearest: 'd1')" in str(found)
    assert diff(a, a).same


def test_without_tolerance_bits_are_compared():
    zeros, negative = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    found = one(zeros, negative)
    assert (found.unequal, found.beyond, found.max_abs, found.worst) == (1, 1, 0.0, (1,))
    assert not found.tolerated
    nan, other = bits(0x7FC00000), bits(0x7FC00123)
    assert one(nan, nan.clone()) is None
    assert one(nan, other).beyond == 1


def test_with_tolerance_nan_equals_nan_and_zeros_are_equal():
    left = torch.cat([torch.tensor([0.0, 1.0]), bits(0x7FC00000)])
    right = torch.cat([torch.tensor([-0.0, 1.0]), bits(0x7FC00123)])
    found = one(left, right, atol=1e-30)
    assert (found.unequal, found.beyond, found.tolerated) == (2, 0, True)
    assert diff(Held(x=left), Held(x=right), atol=1e-30).same


@pytest.mark.parametrize(
    ("a", "b", "max_abs", "max_rel", "beyond"),
    [
        (1.0, 1.5, 0.5, 1 / 3, False),  # 0.5 <= 0.1 + 0.3 * 1.5
        (1.5, 1.0, 0.5, 0.5, True),  # 0.5 > 0.1 + 0.3: relative to the second
        (0.1, 0.0, 0.1, INF, True),  # 0.1 is a little more in float32
        (0.0, 0.5, 0.5, 1.0, True),
        (INF, INF, 0.0, 0.0, False),
        (INF, -INF, INF, INF, True),
        (1.0, INF, INF, INF, True),
        (INF, 1.0, INF, INF, True),
        (NAN, 1.0, INF, INF, True),
        (1.0, NAN, INF, INF, True),
        (NAN, NAN, 0.0, 0.0, False),
        (NAN, INF, INF, INF, True),
    ],
)
def test_the_rule(a, b, max_abs, max_rel, beyond):
    found = one(torch.tensor([0.0, a]), torch.tensor([0.0, b]), atol=0.1, rtol=0.3)
    if max_abs == 0:
        assert found is None
        return
    assert (found.max_abs, found.max_rel) == (pytest.approx(max_abs), pytest.approx(max_rel))
    assert (found.unequal, found.beyond) == (1, int(beyond))
    assert found.worst == ((1,) if beyond else None)


def test_other_dtypes_are_compared_when_asked():
    values = torch.randn(5, 4)
    found = diff(Held(x=values), Held(x=values.bfloat16()))
    assert not found.same
    assert not found.tensors[0].compared
    found = one(values, values.bfloat16(), promote=True)
    assert found.beyond == int((values != values.bfloat16()).sum())
    assert found.max_abs == float((values.double() - values.bfloat16().double()).abs().max())
    assert diff(Held(x=values), Held(x=values.bfloat16()), promote=True, rtol=2**-8).same
    assert diff(Held(x=torch.arange(3)), Held(x=torch.arange(3.0)), promote=True).same


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype(dtype):
    ones, zeros = torch.ones(7).to(dtype), torch.zeros(7).to(dtype)
    assert diff(Held(x=ones), Held(x=ones.clone())).same
    for options in ({}, {"atol": 0.25}):
        found = one(ones, torch.cat([ones[:3], zeros[:1], ones[4:]]), **options)
        assert (found.unequal, found.beyond, found.worst) == (1, 1, (3,))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_tiles_give_what_the_whole_gives(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    numbers = st.sampled_from([0.0, -0.0, 1.0, 1.0625, -1.0, 3.0, NAN, INF, -INF])
    numel = math.prod(shape)
    a, b = (torch.tensor(data.draw(st.lists(numbers, min_size=numel, max_size=numel))).reshape(shape) for _ in "ab")
    rtol, atol = data.draw(st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, 0.5), (0.1, 2.0)]))
    limit = data.draw(st.integers(1, 20))
    left, right = Held(x=a), Held(x=b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d9d.ckpt._tiles.TILE_ELEMENTS", limit)
        found = diff(left, right, rtol=rtol, atol=atol)
    assert max(left.largest, right.largest) <= limit
    exact = rtol == atol == 0
    if exact:
        beyond = a.view(torch.int32) != b.view(torch.int32) if numel else torch.zeros(shape, dtype=torch.bool)
    else:
        beyond = ~torch.isclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)
    assert found.same == (not beyond.any())
    assert sum(tensor.beyond for tensor in found.tensors) == int(beyond.sum())
    for tensor in found.tensors:
        if tensor.beyond:
            gap = (
                (a.double() - b.double())
                .abs()
                .masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
                .nan_to_num(nan=INF, posinf=INF)
            )
            assert beyond[tensor.worst]
            assert tensor.worst_abs == gap[tensor.worst] == gap[beyond].max()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), max_size=4), st.integers(1, 30))
def test_tiles_cover_each_element_once_in_order(shape, limit):
    count = torch.zeros(shape, dtype=torch.int64)
    order = torch.arange(count.numel()).reshape(shape)
    seen = []
    for tile in tiles("x", TensorSpec(shape, torch.float32), limit):
        assert tile.numel <= limit
        count[tile.slices] += 1
        seen += order[tile.slices].reshape(-1).tolist()
    assert seen == list(range(count.numel()))


def test_progress_reaches_the_end():
    seen = []
    a, b = Held(x=torch.ones(10), y=torch.ones(2)), Held(x=torch.ones(10), y=torch.ones(3))
    diff(b, a, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(40, 52)]
    diff(a, a, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (48, 48)


def test_wrong_tolerances_are_refused():
    for tolerance in (-1.0, NAN):
        with pytest.raises(ValueError, match="rtol must be 0 or more"):
            diff(Held(), Held(), rtol=tolerance)


def test_a_job_checkpoint_against_a_file(tmp_path):
    values = {"a": torch.randn(4, 3), "b": torch.arange(5)}
    save_file(values, tmp_path / "w.safetensors")
    JobCheckpoints(tmp_path / "job").save(1, values, shared={}, per_rank={})
    job = JobCheckpoints(tmp_path / "job").latest()
    assert diff(open_checkpoint(tmp_path / "w.safetensors"), job.source).same
