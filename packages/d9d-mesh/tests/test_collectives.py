"""Collectives of objects and of ragged tensors, each with its asynchronous twin."""

import math
import pickle

import pytest
import torch
import torch.distributed as dist

from d9d.mesh import (
    Pending,
    all_gather_objects,
    all_gather_objects_async,
    all_gather_ragged,
    all_gather_ragged_async,
    broadcast_object,
    broadcast_object_async,
    broadcast_ragged,
    broadcast_ragged_async,
    gather_objects,
    gather_objects_async,
    gather_ragged,
    gather_ragged_async,
)
from d9d.mesh.testing import run_world

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.bool, torch.uint8, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


def _pair():
    """Ranks 0 and 2, or 1 and 3: the rank in the group is not the one in the world."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pairs[dist.get_rank() % 2]


def _object(rank: int) -> dict[str, object]:
    return {"rank": rank, "data": [rank] * 100 * rank}


def _ragged(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(3 * rank).view(rank, 3).to(dtype)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.double().real, expected.double().real)


def _sync_and_async(sync, asynchronous, *arguments, **keywords):
    """What both give, after a look at whether it is the same."""
    pending = asynchronous(*arguments, **keywords)
    assert isinstance(pending, Pending)
    later, now = pending.wait(), sync(*arguments, **keywords)
    assert pending.wait() is later
    assert pickle.dumps(later) == pickle.dumps(now)
    return now


def _objects():
    rank, pair = dist.get_rank(), _pair()
    mine = _object(rank)
    return {
        "all": _sync_and_async(all_gather_objects, all_gather_objects_async, mine),
        "all of pair": _sync_and_async(all_gather_objects, all_gather_objects_async, rank, pair),
        "to first": _sync_and_async(gather_objects, gather_objects_async, rank, pair),
        "to second": _sync_and_async(gather_objects, gather_objects_async, rank, pair, group_dst=1),
        "from first": _sync_and_async(broadcast_object, broadcast_object_async, rank, pair),
        "from second": _sync_and_async(broadcast_object, broadcast_object_async, rank, pair, group_src=1),
    }


def test_objects_over_the_world_and_over_groups():
    for rank, found in enumerate(run_world(4, _objects)):
        first, second = rank % 2, rank % 2 + 2
        assert found == {
            "all": [_object(r) for r in range(4)],
            "all of pair": [first, second],
            "to first": [first, second] if rank == first else None,
            "to second": [first, second] if rank == second else None,
            "from first": first,
            "from second": second,
        }


def _tensors():
    rank, pair = dist.get_rank(), _pair()
    first, second = rank % 2, rank % 2 + 2
    for dtype in DTYPES:
        mine = _ragged(rank, dtype)
        everyone = all_gather_ragged(mine)
        assert [tuple(t.shape) for t in everyone] == [(r, 3) for r in range(4)]
        assert all(_same(t, _ragged(r, dtype)) for r, t in enumerate(everyone))
        both = all_gather_ragged_async(mine, pair).wait()
        assert all(map(_same, both, [_ragged(first, dtype), _ragged(second, dtype)]))
        to_second = gather_ragged(mine, pair, group_dst=1)
        to_second_later = gather_ragged_async(mine, pair, group_dst=1).wait()
        assert (to_second is None) == (to_second_later is None) == (rank == first)
        for gathered in (to_second, to_second_later):
            assert gathered is None or all(map(_same, gathered, both))
        assert _same(broadcast_ragged(mine if rank == second else None, pair, group_src=1), _ragged(second, dtype))
        assert _same(broadcast_ragged_async(mine, pair).wait(), _ragged(first, dtype))
    return True


def _shapes():
    """What users pass: nothing at all, views, scalars, leaves of a graph."""
    rank = dist.get_rank()
    assert [t.shape for t in all_gather_ragged(torch.empty(0, 2, dtype=torch.int32))] == [(0, 2)] * 4
    assert [t.shape for t in all_gather_ragged(torch.ones(rank, 0))] == [(r, 0) for r in range(4)]
    columns = torch.arange(12.0).view(3, 4)[:, rank : rank + 1].t()
    assert torch.equal(torch.cat(all_gather_ragged(columns)), torch.arange(12.0).view(3, 4).t())
    leaf = torch.ones(rank + 1, requires_grad=True)
    assert not any(t.requires_grad for t in all_gather_ragged(leaf))
    assert broadcast_ragged(torch.tensor(math.pi) if rank == 0 else None).item() == pytest.approx(math.pi)
    assert broadcast_ragged(torch.empty(3, 0, 2) if rank == 3 else None, group_src=3).shape == (3, 0, 2)
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert all(torch.equal(t, conjugate.resolve_conj()) for t in all_gather_ragged(conjugate))
    strided = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(broadcast_ragged(strided if rank == 1 else None, group_src=1), strided)
    return True


def _several_under_way():
    """Case 44: sources are overwritten and freed at once, handles waited for in another order."""
    rank = dist.get_rank()
    source = torch.full((rank + 1, 1000), float(rank))
    gathered = all_gather_ragged_async(source)
    sent = broadcast_ragged_async(source if rank == 2 else None, group_src=2)
    source.fill_(-1.0)
    objects = all_gather_objects_async([rank])
    collected = gather_ragged_async(torch.full((rank,), rank))
    dropped = all_gather_objects_async("not waited for")
    del source, dropped
    assert objects.wait() == [[r] for r in range(4)]
    assert rank == 2 or torch.equal(sent.wait(), torch.full((3, 1000), 2.0))
    assert all(torch.equal(t, torch.full((r + 1, 1000), float(r))) for r, t in enumerate(gathered.wait()))
    assert (collected.wait() is None) == (rank != 0)
    return True


def _all_of_tensors():
    return _tensors() and _shapes() and _several_under_way()


def test_ragged_tensors_of_all_dtypes_and_shapes():
    assert run_world(4, _all_of_tensors) == [True] * 4


def _refusals() -> list[str]:
    rank = dist.get_rank()
    said = []
    unlike = [
        torch.ones(()) if rank else torch.ones(2),
        torch.ones((2, 3) if rank else (2, 4)),
        torch.ones(2, dtype=torch.float64 if rank else torch.float32),
        torch.ones(2, 1) if rank else torch.ones(2),
    ]
    for tensor in unlike:
        for collective in (all_gather_ragged, all_gather_ragged_async, gather_ragged, gather_ragged_async):
            with pytest.raises(ValueError, match="have a dim 0 and differ in its size only") as caught:
                collective(tensor)
        said.append(str(caught.value))
    with pytest.raises(ValueError, match="rank 1 of the group is to broadcast a tensor, and passed None"):
        broadcast_ragged(None if rank else torch.ones(2), group_src=1)
    value = (lambda: None) if rank == 1 else 1
    for collective in (all_gather_objects, gather_objects):
        with pytest.raises(pickle.PicklingError, match=r"ranks \[1\] of the group have values that cannot be pickled"):
            collective(value)
    with pytest.raises(pickle.PicklingError, match=r"ranks \[1\]") as caught:
        broadcast_object(value, group_src=1)
    assert (caught.value.__cause__ is not None) == (rank == 1)
    with pytest.raises(ValueError, match="rank 2 is not in a group of 2"):
        gather_objects(1, group_dst=2)
    with pytest.raises(ValueError, match="rank -1 is not in a group of 2"):
        broadcast_ragged(torch.ones(1), group_src=-1)
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 calls a collective of a group that it is not in"):
            all_gather_objects(1, alone)
    assert all_gather_objects(rank) == [0, 1]  # nothing is left hanging
    return said


def test_what_does_not_go_together_is_refused_on_every_rank():
    first, second = run_world(2, _refusals)
    assert first == second
    assert "the ranks hold [2, 4] torch.float32 on cpu, [2, 3] torch.float32 on cpu" in first[1]
