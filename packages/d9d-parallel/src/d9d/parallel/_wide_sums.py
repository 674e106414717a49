"""Gradients of shards that are summed over microbatches in a wider dtype than the shards have.

`fully_shard` casts each reduced gradient to the dtype of the shard and adds it up there, where bf16 loses what is
small. Its hook on a unit's reduced buffer sees the gradients before the cast, one after the other; the hooks on the
gradients of its parameters, which it calls in the same order, tell whose they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ._layout import laid_out_as, local_tensor


class WideSums:
    """Makes the gradients of one unit wide.

    Args:
        parts: For each parameter of the unit, the module that holds it, its name there, and how many elements of the
            reduced buffer are for it: as many as the largest shard has.
    """

    def __init__(self, parts: Sequence[tuple[nn.Module, str, int]]) -> None:
        self._parts = parts
        self._reduced: Tensor | None = None
        self._begin = 0
        """Where in the reduced buffer the next gradient begins."""

    def install(self, module: FSDPModule) -> None:
        """Hook into the unit, of which ``module`` is the first module."""
        module.set_all_reduce_hook(self._take)

        def before_first_forward(*_: object) -> None:
            handle.remove()
            module.reshard()  # a stage of a pipeline is gathered before its forward
            self._hook_parameters()

        # Parameters may be replaced until then; fully_shard's own hook, which gathers them, comes after this one.
        assert isinstance(module, nn.Module)
        handle: RemovableHandle = module.register_forward_pre_hook(before_first_forward, prepend=True)

    def _hook_parameters(self) -> None:
        # The hooks hold this, and shall not hold the modules: what a tensor holds, Python cannot see to collect.
        parts, self._parts = self._parts, ()
        for owner, name, size in parts:
            parameter = owner.get_parameter(name)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, size=size: self._add(p, size))

    def _take(self, reduced: Tensor) -> None:
        """Keep the reduced buffer, and leave zeros to be cast and added."""
        self._reduced, self._begin = reduced.clone(), 0
        reduced.zero_()
        if reduced.is_cuda:
            # It is of another stream, to whose allocations torch 2.11 returns it before this one is done.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))

    def _add(self, parameter: Tensor, size: int) -> None:
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        assert self._reduced is not None
        held = local_tensor(parameter.grad)
        part = self._reduced[self._begin :][: held.numel()].view(held.shape)
        self._begin += size
        if self._begin == self._reduced.numel():
            self._reduced = None
        if held.dtype == _wide(parameter.dtype):
            held.add_(part)
            return
        # Any: fully_shard itself sets a narrow one first, in every step. Before the first one it would take this over.
        parameter.grad_dtype = None
        parameter.grad = laid_out_as(parameter, part.to(_wide(parameter.dtype)))


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether sums in the dtype lose what is small."""
    return _wide(dtype) != dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
