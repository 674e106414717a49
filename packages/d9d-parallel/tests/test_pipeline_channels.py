"""Messages between two ranks, and the process groups that NCCL needs for them; here over gloo."""

import itertools
import weakref

import torch
import torch.distributed as dist

from d9d.mesh.testing import run_world
from d9d.parallel.pipeline._awaited import GradientOf, OutputOf
from d9d.parallel.pipeline._channels import Channels
from d9d.parallel.pipeline._forms import Forms
from d9d.parallel.pipeline._pair_groups import pair_groups
from d9d.parallel.pipeline._tree import TensorSpec, TreeForm, tensors_in

CPU = torch.device("cpu")


class Known:
    """What one need not be told of."""

    def __init__(self, specs) -> None:
        self._specs = specs

    def specs(self):
        return self._specs

    def learn(self, form) -> None:
        raise AssertionError(form)


def exchange() -> list[str]:
    """Every dtype, shapes without elements and dims, strides; sources that change once the send is posted."""
    rank = dist.get_rank()
    channels = Channels(dist.group.WORLD, [(0, 1), (1, 0)], CPU)
    dtypes = (torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.bool, torch.float8_e4m3fn)
    tensors = [torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes]
    tensors += [torch.tensor(3.5), torch.empty(0, 4), torch.arange(6.0).reshape(2, 3).T, torch.ones(1).expand(5)]
    specs = [TensorSpec.of(tensor) for tensor in tensors]
    # Both ways at once, the receives posted after the sends.
    sources = [tensor.clone() for tensor in tensors]
    watched = [weakref.ref(source) for source in sources]
    channels.send(sources, to=1 - rank)
    for source in sources:
        source.zero_()
    del source, sources
    assert not any(source() is not None for source in watched)
    for _ in range(2):
        channels.send([torch.full((3,), float(rank))], to=1 - rank)
    first, second, third = (
        channels.receive(Known(s), source=1 - rank) for s in (specs, *[[TensorSpec((3,), torch.float32)]] * 2)
    )
    for found, tensor in zip(first.take(), tensors):
        assert found.dtype == tensor.dtype
        assert found.is_contiguous()
        assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))
    assert all(torch.equal(r.take()[0], torch.full((3,), 1.0 - rank)) for r in (third, second))
    channels.finish()
    return [str(spec) for spec in specs]


def test_messages_arrive_as_they_were_when_they_were_sent():
    """Case 44."""
    assert run_world(2, exchange)[0][0] == "float64 (2, 3)"


def announce() -> None:
    """What is not known is announced; what comes after it waits, and so does a gradient whose tensor is not made."""
    rank = dist.get_rank()
    channels = Channels(dist.group.WORLD, [(0, 1), (1, 0)], CPU)
    forms = Forms()
    tree = {"a": torch.ones(3), "b": (torch.tensor(2), "constant")}
    first, second = (channels.receive(OutputOf(forms, 4, "kind"), source=1 - rank) for _ in range(2))
    gradient = channels.receive(GradientOf(forms, 5, "kind"), source=1 - rank)
    channels.announce(TreeForm.of(tree), to=1 - rank)
    for factor in (1, 2):
        channels.send([factor * tensor for tensor in tensors_in(tree)], to=1 - rank)
    channels.send([torch.full((7,), 5.0)], to=1 - rank)
    assert [tensor.tolist() for tensor in second.take()] == [[2.0] * 3, 4]
    assert [tensor.tolist() for tensor in first.take()] == [[1.0] * 3, 2]
    assert forms.get(4, "kind") == TreeForm.of(tree)
    forms.learn(5, "kind", TreeForm.of([torch.zeros(7), torch.tensor(1)]))  # the integer has no gradient
    assert [tensor.tolist() for tensor in gradient.take()] == [[5.0] * 7]
    channels.finish()


def test_the_first_message_of_a_kind_is_announced_and_keeps_its_place():
    run_world(2, announce)


def connect() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    dist.new_group([0, 1])  # others have made fewer groups
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    half = halves[rank % 2]
    for group, size in ((half, 2), (world, 4), (world, 4)):
        ring = [(a, (a + 1) % size) for a in range(size)]
        pairs = set(ring) | {(b, a) for a, b in ring}
        groups = pair_groups(group, pairs, CPU)
        me, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        assert set(groups) == {pair for pair in pairs if me in pair}
        assert len({id(made) for made in groups.values()}) == len(groups)
        # Receives are posted in one order, sends in another.
        receipts = {}
        for source, destination in sorted(groups):
            if destination == me:
                buffer = torch.empty(1)
                work = dist.irecv(buffer, ranks[source], group=groups[source, destination])
                receipts[source] = buffer, work
        works = [
            dist.isend(torch.tensor([float(me)]), ranks[destination], group=made)
            for (source, destination), made in sorted(groups.items(), reverse=True)
            if source == me
        ]
        for source, (buffer, work) in receipts.items():
            work.wait()
            assert buffer.item() == source
        for work in works:
            work.wait()
    before = dict(pair_groups(world, [(0, 1)], CPU))
    assert all(before[pair] is made for pair, made in pair_groups(world, [(0, 1)], CPU).items())
    assert set(itertools.chain(*before)) <= set(range(4))


def test_every_channel_of_every_pipeline_gets_a_group_of_its_own_once():
    run_world(4, connect)
