"""Messages between the ranks of a pipeline.

A channel is an ordered pair of ranks, and first in first out. Channels do not wait for each other: gloo tells messages
apart by the ranks at both ends, and on NCCL, which runs whatever one communicator has to do in one order on one stream,
each channel is a process group of its own. On CUDA the host waits for an announcement alone.
"""

import pickle
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ._pair_groups import pair_groups
from ._tree import TensorSpec, TreeForm

_TAG = 0x9D9
"""Apart from messages that a user sends in the same group; gloo knows tags, NCCL does not need them here."""


class Channels:
    """All channels of one rank.

    Collective, on CUDA over all ranks of the job: each pipeline of the job makes its channels at the same time.

    Args:
        group: The pipeline's ranks.
        pairs: Source and destination of each channel of the pipeline, as ranks of the group; the same on every rank.
        device: Where tensors are.
    """

    def __init__(self, group: ProcessGroup, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        self._groups: Mapping[tuple[int, int], ProcessGroup]
        if device.type == "cuda":
            self._groups = pair_groups(group, pairs, device)
        else:
            self._groups = dict.fromkeys(pairs, group)
        self._leaving: defaultdict[int, deque[tuple[Work, Tensor]]] = defaultdict(deque)
        """By destination, what has been posted and may not have left."""
        self._unposted: defaultdict[int, deque[Receipt]] = defaultdict(deque)
        """By source, what cannot be posted yet."""

    def send(self, tensors: Iterable[Tensor], *, to: int) -> None:
        """Post a send of each tensor, without waiting.

        What leaves is a copy, taken here: it costs a pass over the memory, and whoever overwrites or frees a tensor
        before it has left changes nothing of what arrives.

        Args:
            tensors: Those that the other end receives, in its order.
            to: Rank in the pipeline.
        """
        group, leaving = self._groups[self._rank, to], self._leaving[to]
        # NCCL is asked; gloo tells only who waits for it, so there the copies stay until the step is over.
        while leaving and leaving[0][0].is_completed():
            # It has left, so this costs nothing; torch too holds the memory until someone has waited.
            leaving.popleft()[0].wait()
        for tensor in tensors:
            if tensor.numel():
                message = tensor.detach().clone(memory_format=torch.contiguous_format)
                work = dist.isend(_bytes_of(message), self._ranks[to], group=group, tag=_TAG)
                assert work is not None
                leaving.append((work, message))

    def announce(self, form: TreeForm, *, to: int) -> None:
        """Say what the next message is, which the other end does not know.

        Args:
            form: Of what is sent next.
            to: Rank in the pipeline.
        """
        message = torch.frombuffer(bytearray(pickle.dumps(form.build(form.tensors))), dtype=torch.uint8)
        self.send([tensor.to(self._device) for tensor in (torch.tensor([len(message)]), message)], to=to)

    def receive(self, awaited: "Awaited", *, source: int) -> "Receipt":
        """Receive what leaves another stage, without waiting; posted when those before it are, and when it is known.

        Args:
            awaited: What is sent.
            source: Rank in the pipeline.
        """
        receipt = Receipt(self, source, awaited)
        self._unposted[source].append(receipt)
        while (unposted := self._unposted[source]) and (specs := unposted[0].awaited.specs()) is not None:
            unposted.popleft().posted = self._post(specs, source)
        return receipt

    def post(self, receipt: "Receipt") -> None:
        """Post a receive and all that come before it; waits for the announcement of one that is not known."""
        while receipt.posted is None:
            first = self._unposted[receipt.source].popleft()
            if (specs := first.awaited.specs()) is None:
                first.awaited.learn(self._announced(first.source))
                specs = first.awaited.specs()
            assert specs is not None
            first.posted = self._post(specs, first.source)

    def _post(self, specs: Iterable[TensorSpec], source: int) -> "Posted":
        group = self._groups[source, self._rank]
        tensors = [spec.empty(self._device) for spec in specs]
        posted = [
            dist.irecv(_bytes_of(tensor), self._ranks[source], group=group, tag=_TAG)
            for tensor in tensors
            if tensor.numel()
        ]
        return Posted(tensors, [work for work in posted if work is not None])

    def _announced(self, source: int) -> TreeForm:
        [length] = self._post([TensorSpec((1,), torch.int64)], source).take()
        [message] = self._post([TensorSpec((int(length),), torch.uint8)], source).take()
        return TreeForm.of(pickle.loads(bytes(message.tolist())))  # noqa: S301 - from another rank of this job

    def zeros(self, spec: TensorSpec) -> Tensor:
        """What to send where there is nothing to send."""
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)

    def finish(self) -> None:
        """Wait until all messages have left; on CUDA the current stream does, and not the host."""
        for leaving in self._leaving.values():
            while leaving:
                leaving[0][0].wait()
                leaving.popleft()

    def abandon(self) -> None:
        """Forget what a failed step was still to receive."""
        self._unposted.clear()


class Awaited(Protocol):
    """What is to arrive."""

    def specs(self) -> Sequence[TensorSpec] | None:
        """The tensors; ``None`` while that is not known."""

    def learn(self, form: TreeForm) -> None:
        """It was announced."""


@attrs.frozen
class Posted:
    """Tensors that are on their way to this rank."""

    _tensors: Sequence[Tensor]
    _works: Sequence[Work]

    def take(self) -> list[Tensor]:
        """The tensors, once they are there; on CUDA for what the current stream does next."""
        for work in self._works:
            work.wait()
        return list(self._tensors)


@attrs.define(eq=False)
class Receipt:
    """Tensors that are to arrive."""

    channels: Channels
    source: int
    awaited: Awaited
    posted: Posted | None = None

    def take(self) -> list[Tensor]:
        """The tensors, as `Posted.take` gives them."""
        self.channels.post(self)
        assert self.posted is not None
        return self.posted.take()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: no backend takes every dtype, all take bytes."""
    return tensor.view(-1).view(torch.uint8)
