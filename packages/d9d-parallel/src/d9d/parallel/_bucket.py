"""One flat buffer for the gradients of many parameters, reduced as one tensor."""

from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate

from ._fsdp import is_fully_sharded
from ._layout import grad_placements, local_tensor
from ._mesh_dims import MeshDims


class Bucket:
    """Gradients that are summed over the same ranks.

    Args:
        shapes: Of the gradients, which share one buffer in this order.
        groups: Over which the buffer is summed, one after the other.
        dtype: Of the buffer.
        device: Of the buffer.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], groups: Sequence[ProcessGroup], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._groups = groups
        sizes = [shape.numel() for shape in shapes]
        self._buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views = [part.view(shape) for part, shape in zip(self._buffer.split(sizes), shapes)]
        self._work: dist.Work | None = None

    def zero(self) -> None:
        """Forget all gradients."""
        self._buffer.zero_()

    def reduce_async(self, stream: torch.cuda.Stream | None) -> None:
        """Start to sum over the groups; the buffer is not to be touched until `wait`.

        Args:
            stream: Where to do it on CUDA, after what the current stream has been given so far.
        """
        if not self._groups:
            return
        if stream is None:
            # Gloo works in threads of its own; a second sum starts when the first is waited for.
            self._work = dist.all_reduce(self._buffer, group=self._groups[0], async_op=True)
            return
        stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
        with torch.cuda.stream(stream):
            for group in self._groups:
                dist.all_reduce(self._buffer, group=group)

    def wait(self) -> None:
        """End what `reduce_async` started. On CUDA the caller joins the stream."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for group in self._groups[1:]:
            dist.all_reduce(self._buffer, group=group)


@attrs.frozen
class BucketPlan:
    """Parameters whose gradients share a buffer."""

    parameters: tuple[nn.Parameter, ...]
    groups: tuple[ProcessGroup, ...]


def plan_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int, dtype: torch.dtype) -> Iterator[BucketPlan]:
    """Buckets in the order in which backward fills them, if it runs through the parameters from the last to the first.

    Raises:
        ValueError: A DTensor among the parameters says nothing of its gradient.
    """
    open_ones: dict[MeshDims, list[nn.Parameter]] = {}
    sizes: dict[MeshDims, int] = {}
    for parameter in reversed(parameters):
        reduction = _reduction(parameter)
        open_ones.setdefault(reduction, []).append(parameter)
        sizes[reduction] = sizes.get(reduction, 0) + local_tensor(parameter).numel() * dtype.itemsize
        if sizes[reduction] >= bucket_bytes:
            del sizes[reduction]
            yield BucketPlan(tuple(open_ones.pop(reduction)), reduction.groups())
    for reduction, members in open_ones.items():
        yield BucketPlan(tuple(members), reduction.groups())


def _reduction(parameter: nn.Parameter) -> MeshDims:
    """Over which dims a gradient is to be summed."""
    if not isinstance(parameter, DTensor):
        return MeshDims()
    if is_fully_sharded(parameter):
        raise ValueError(
            f"fully_shard sums the gradient of a parameter of shape {tuple(parameter.shape)} itself: give GradientSync "
            "those for which is_fully_sharded is false"
        )
    placements = grad_placements(parameter)
    if placements is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} with placements {parameter.placements} was not laid out by "
            "a parallelize function of d9d.parallel, so nothing says over which dims its gradient is to be summed"
        )
    mesh = parameter.device_mesh
    for dim, (placement, grad) in enumerate(zip(parameter.placements, placements)):
        assert grad == placement or (isinstance(grad, Partial) and isinstance(placement, Replicate)), dim
    partial = (dim for dim, placement in enumerate(placements) if isinstance(placement, Partial))
    return MeshDims.larger_than_one(mesh, partial)
