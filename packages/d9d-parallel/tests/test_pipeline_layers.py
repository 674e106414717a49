import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d.parallel.pipeline._layers import distribute_layers


def test_a_head_that_costs_three_layers_gets_three_less():
    assert distribute_layers([1] * 13, stages=4, head=3) == [range(4), range(4, 8), range(8, 12), range(12, 13)]


def test_stages_that_do_not_set_the_pace_are_even_too():
    assert distribute_layers([9, 1, 1, 1, 1], stages=3) == [range(1), range(1, 3), range(3, 5)]


def test_an_embedding_may_be_a_stage_of_its_own():
    assert distribute_layers([1] * 4, stages=3, embedding=9) == [range(0), range(2), range(2, 4)]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_no_cut_is_faster_and_none_as_fast_is_more_even(costs, stages, embedding, head):
    if len(costs) < stages - 2:
        with pytest.raises(ValueError, match="cannot be cut"):
            distribute_layers(costs, stages=stages)
        return

    def measure(bounds: tuple[int, ...]) -> tuple[int, int]:
        found = [sum(costs[start:end]) for start, end in itertools.pairwise(bounds)]
        found[0] += embedding
        found[-1] += head
        return max(found), sum(cost * cost for cost in found)

    cuts = [
        (0, *inner, len(costs)) for inner in itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1)
    ]
    allowed = [cut for cut in cuts if all(a < b for a, b in list(itertools.pairwise(cut))[1:-1])]
    found = distribute_layers(costs, stages=stages, embedding=embedding, head=head)
    bounds = (0, *(layers.stop for layers in found))
    assert [layers.start for layers in found] == list(bounds[:-1])
    assert bounds in allowed
    assert measure(bounds) == min(map(measure, allowed))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="finite and not negative"):
        distribute_layers([1.0, wrong], stages=2)
    with pytest.raises(ValueError, match="finite and not negative"):
        distribute_layers([1, 1], stages=2, head=wrong)


def test_more_stages_than_layers_name_what_would_do():
    with pytest.raises(ValueError, match=r"2 layers cannot be cut into stages=5: give 1 to 4"):
        distribute_layers([1, 1], stages=5)
