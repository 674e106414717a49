"""Messages between the ranks of a pipeline.

A channel is an ordered pair of ranks, and first in first out. Channels do not wait for each other: gloo tells messages
apart by the ranks at both ends, and on NCCL, which runs whatever one communicator has to do in one order on one stream,
each channel is a process group of its own. Nothing here makes the host wait on CUDA.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ._pair_groups import pair_groups
from ._tree import TensorSpec

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

    def receive(self, specs: Iterable[TensorSpec], *, source: int) -> "Receipt":
        """Post a receive of each tensor, without waiting.

        Args:
            specs: What is sent.
            source: Rank in the pipeline.
        """
        group = self._groups[source, self._rank]
        tensors = [spec.empty(self._device) for spec in specs]
        posted = [
            dist.irecv(_bytes_of(tensor), self._ranks[source], group=group, tag=_TAG)
            for tensor in tensors
            if tensor.numel()
        ]
        return Receipt(tensors, [work for work in posted if work is not None])

    def zeros(self, spec: TensorSpec) -> Tensor:
        """What to send where there is nothing to send."""
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)

    def finish(self) -> None:
        """Wait until all messages have left; on CUDA the current stream does, and not the host."""
        for leaving in self._leaving.values():
            while leaving:
                leaving[0][0].wait()
                leaving.popleft()


@attrs.frozen
class Receipt:
    """Tensors that are on their way to this rank."""

    _tensors: Sequence[Tensor]
    _posted: Sequence[Work]

    def take(self) -> list[Tensor]:
        """The tensors, once they are there; on CUDA for what the current stream does next."""
        for work in self._posted:
            work.wait()
        return list(self._tensors)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: no backend takes every dtype, all take bytes."""
    return tensor.view(-1).view(torch.uint8)
