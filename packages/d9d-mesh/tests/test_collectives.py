"""Gathers of objects and of ragged tensors."""

import pytest
import torch
import torch.distributed as dist

from d9d.mesh import all_gather_objects, all_gather_ragged, broadcast_object, gather_objects
from d9d.mesh.testing import run_world


def _objects() -> tuple[list[dict[str, int]], list[str] | None, str, list[int]]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return (
        all_gather_objects({"rank": rank}),
        gather_objects(f"r{rank}", pairs[rank % 2]),
        broadcast_object(f"from {rank}", pairs[rank % 2]),
        all_gather_objects(rank, pairs[rank % 2]),
    )


def test_objects_over_the_world_and_over_a_group():
    seen = run_world(4, _objects)
    for rank, (everyone, gathered, sent, pair) in enumerate(seen):
        assert everyone == [{"rank": r} for r in range(4)]
        assert gathered == ([f"r{rank}", f"r{rank + 2}"] if rank < 2 else None)
        assert sent == f"from {rank % 2}"
        assert pair == [rank % 2, rank % 2 + 2]


def _ragged(dtype: torch.dtype) -> list[torch.Tensor]:
    rank = dist.get_rank()
    return all_gather_ragged(torch.full((rank, 3), rank, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_ragged_tensors_empty_ones_included(dtype):
    for seen in run_world(4, _ragged, dtype):
        assert [tuple(t.shape) for t in seen] == [(r, 3) for r in range(4)]
        assert all(torch.equal(t, torch.full((r, 3), r, dtype=dtype)) for r, t in enumerate(seen))


def _unlike() -> str:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="have a dim 0 and differ in no other"):
        all_gather_ragged(torch.ones(()) if rank else torch.ones(2))
    with pytest.raises(ValueError, match="have a dim 0 and differ in no other") as caught:
        all_gather_ragged(torch.ones((2, 3) if rank else (2, 4)))
    return str(caught.value)


def test_tensors_that_do_not_go_together_are_refused_on_every_rank():
    first, second = run_world(2, _unlike)
    assert first == second
