"""GradientSync beyond the happy path."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world
from d9d.parallel import GradientSync, parallelize_replicate


def test_tiny_gradients_of_bf16_parameters_are_not_lost():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    sync = GradientSync([[weight]])
    for i in range(1000):
        with sync.microbatch(0, last=i == 999):
            ((weight * 1.0).sum() * (1000.0 if i == 0 else 1.0)).backward()
    sync.finish()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == [1999.0] * 4


def test_steps_are_used_in_order():
    weight = nn.Parameter(torch.ones(2))
    sync = GradientSync([[weight]])
    with pytest.raises(RuntimeError, match="no microbatch has begun"):
        sync.finish()
    with pytest.raises(RuntimeError, match="outside GradientSync.microbatch"):
        weight.sum().backward()
    weight.grad = None
    with sync.microbatch(0, last=False):
        weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"stages \[0\] have had no microbatch with last=True"):
        sync.finish()
    with sync.microbatch(0, last=True):
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="after its sum over ranks had started"):
            weight.sum().backward()


def _different_parameters_on_each_rank() -> list[list[float]]:
    """Case 14, and ranks that fill buckets in different orders."""
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))
    parallelize_replicate(module, DistContext.launch(MeshConfig(replicate=2), "cpu").mesh("dense")["dp_replicate"])
    sync = GradientSync([list(module.parameters())], bucket_bytes=1)
    rank = dist.get_rank()
    used = [[(0, 1), (2,)], [(3,), ()]][rank]
    for i, layers in enumerate(used):
        with sync.microbatch(0, last=i == 1):
            for layer in layers:
                module[layer](torch.full((1, 1), layer + 1.0)).sum().backward()
    sync.finish()
    return [p.grad.full_tensor().flatten().tolist() for p in module.parameters()]


def test_ranks_may_use_different_parameters():
    for gradients in run_world(2, _different_parameters_on_each_rank):
        assert gradients == [[1.0], [2.0], [3.0], [4.0]]


def _failing_then_good() -> list[float]:
    layer = nn.Linear(2, 1, bias=False)
    parallelize_replicate(layer, DistContext.launch(MeshConfig(replicate=2), "cpu").mesh("dense")["dp_replicate"])
    sync = GradientSync([list(layer.parameters())])
    with sync.microbatch(0, last=False):
        layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="shapes"), sync.microbatch(0, last=True):
        layer(torch.ones(1, 3))
    with sync.microbatch(0, last=True):
        layer(torch.ones(1, 2)).sum().backward()
    sync.finish()
    return next(layer.parameters()).grad.to_local().flatten().tolist()


def test_a_step_after_a_failed_one_starts_from_zero():
    """Case 46."""
    assert run_world(2, _failing_then_good) == [[2.0, 2.0]] * 2


def _penalty() -> None:
    layer = nn.Linear(2, 1, bias=False)
    parallelize_replicate(layer, DistContext.launch(MeshConfig(replicate=2), "cpu").mesh("dense")["dp_replicate"])
    sync = GradientSync([list(layer.parameters())])
    penalty = next(layer.parameters()).full_tensor().square().sum()
    with pytest.raises(RuntimeError, match=r"as a DTensor.*use it as module.weight"), sync.microbatch(0, last=False):
        penalty.backward()
    with sync.microbatch(0, last=True):
        layer.weight.square().sum().backward()
    sync.finish()


def test_a_gradient_that_is_no_addend_is_refused_and_not_added_twice():
    run_world(2, _penalty)


def test_parameters_that_cannot_be_collected_are_refused():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="given twice"):
        GradientSync([[weight], [weight]])
    with pytest.raises(ValueError, match="is on meta: materialize"):
        GradientSync([list(nn.Linear(2, 2, device="meta").parameters())])


def test_a_sync_that_is_gone_leaves_its_parameters_to_the_next():
    weight = nn.Parameter(torch.ones(2))
    first = GradientSync([[weight]])
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    second = GradientSync([[weight]])
    with second.microbatch(0, last=True):
        weight.sum().backward()
    second.finish()
    assert weight.grad.tolist() == [1.0, 1.0]


def _leaves() -> None:
    layer = nn.Linear(2, 1, bias=False)
    parallelize_replicate(layer, DistContext.launch(MeshConfig(), "cpu").mesh("dense")["dp_replicate"])
    parameter = next(layer.parameters())
    sync = GradientSync([[parameter]])
    with torch.no_grad():
        parameter.fill_(3.0)
    assert layer.weight.is_leaf
    assert layer.weight.tolist() == [[3.0, 3.0]]
    with sync.microbatch(0, last=True):
        layer.weight.sum().backward()  # an expanded gradient
    sync.finish()
    assert parameter.grad.to_local().tolist() == [[1.0, 1.0]]
    with sync.microbatch(0, last=True):
        layer.weight.square().sum().backward(create_graph=True)
    sync.finish()
    assert parameter.grad.to_local().tolist() == [[6.0, 6.0]]

    twin = copy.deepcopy(layer)
    pickle.loads(pickle.dumps(dict(layer.state_dict())))
    assert not twin.weight.is_leaf
    assert twin.weight.data_ptr() != layer.weight.data_ptr()

    layer.to(torch.float64)
    assert layer.weight.dtype == torch.float64
    with pytest.raises(RuntimeError, match="was converted"), sync.microbatch(0, last=True):
        pass

    del sync
    gc.collect()
    replaced = GradientSync([list(twin.parameters())])
    del replaced
    gc.collect()
    assert not twin.weight.is_leaf


def test_modules_use_leaves_while_there_is_a_sync():
    run_world(1, _leaves)
