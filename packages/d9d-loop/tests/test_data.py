from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.loop.data import Batches, SampleOrder


@settings(deadline=None)
@given(length=st.integers(1, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(length, seed, epoch):
    order = SampleOrder(length=length, seed=seed)
    start = epoch * length
    assert sorted(order[position] for position in range(start, start + length)) == list(range(length))


def test_epochs_and_seeds_differ_and_the_order_never_changes():
    order = SampleOrder(length=10, seed=0)
    assert [order[i] for i in range(10)] == PINNED
    assert [order[i] for i in range(10, 20)] != PINNED
    other = SampleOrder(length=10, seed=1)
    assert [other[i] for i in range(10)] != PINNED


def test_every_sample_comes_first_equally_often():
    first = Counter(SampleOrder(length=5, seed=seed)[0] for seed in range(5000))
    chi_square = sum((count - 1000) ** 2 / 1000 for count in first.values())
    assert len(first) == 5
    assert chi_square < 18.5  # 0.1 % of uniform draws with 4 degrees of freedom lie beyond


def test_neighbours_part():
    order = SampleOrder(length=1000, seed=3)
    adjacent = sum(abs(order[i + 1] - order[i]) == 1 for i in range(999))
    assert adjacent < 12  # 2 expected


def batches(*, length=100, global_batch=8, microbatch=2, rank=0, ranks=1):
    return Batches(
        dataset=range(length),
        collate=tuple,
        order=SampleOrder(length=length, seed=7),
        global_batch=global_batch,
        microbatch=microbatch,
        rank=rank,
        ranks=ranks,
    )


@settings(deadline=None)
@given(
    length=st.integers(1, 60),
    ranks=st.integers(1, 8),
    microbatch=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    step=st.integers(0, 50),
)
def test_a_step_holds_the_same_samples_in_the_same_order_in_every_layout(length, ranks, microbatch, accumulation, step):
    size = ranks * microbatch * accumulation
    parts = [
        sample
        for rank in range(ranks)
        for part in batches(length=length, global_batch=size, microbatch=microbatch, rank=rank, ranks=ranks).step(step)
        for sample in part
    ]
    (whole,) = batches(length=length, global_batch=size, microbatch=size).step(step)
    assert tuple(parts) == whole


@settings(deadline=None)
@given(length=st.integers(1, 40), global_batch=st.integers(1, 12))
def test_a_batch_that_crosses_an_epoch_takes_its_rest_from_the_next(length, global_batch):
    source = batches(length=length, global_batch=global_batch, microbatch=1)
    seen = [sample for step in range(length) for part in source.step(step) for sample in part]
    for epoch in range(global_batch):
        assert sorted(seen[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_a_batch_that_does_not_divide_says_what_to_do():
    message = r"global_batch=10 does not divide into 2 data ranks × microbatch=4; set global_batch to .* 8, such as 8,"
    with pytest.raises(ValueError, match=message):
        batches(global_batch=10, microbatch=4, ranks=2)
    for bad in ({"global_batch": 0}, {"microbatch": 0}):
        with pytest.raises(ValueError, match="positive multiple"):
            batches(**bad)


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="length=0"):
        batches(length=0)


PINNED = [5, 8, 4, 3, 9, 6, 7, 1, 2, 0]
