"""Gradients summed over microbatches and ranks."""

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ._bucket import Bucket, local_tensor, make_buckets
from ._layout import grad_placements


class GradientSync:
    """Sums gradients over the microbatches of a step and over the ranks that hold addends of them.

    Gradients are collected in flat buffers of a wide dtype. When backward has filled a buffer for the last time in
    a step, its sum over the ranks starts, on CUDA on a stream of its own while backward goes on. Exactly the mesh
    dims over which a parameter's gradient is Partial are summed; nothing is divided. All ranks reduce buffers in one
    order, whatever parameters each of them used, and an unused parameter counts as zeros.

    A step is::

        for i, batch in enumerate(microbatches):
            with sync.microbatch(0, last=i == len(microbatches) - 1):
                loss(model, batch).backward()
        sync.finish()

    Afterwards every parameter's ``grad`` is summed, of dtype ``grad_dtype``, and laid out as the parameter; it is
    valid until the next step begins, which starts from zero. A step that raises is forgotten as a whole.

    Args:
        stages: The parameters of each pipeline stage on this rank; frozen ones are skipped.
        bucket_bytes: Size at which a buffer is closed.
        grad_dtype: Of the buffers and the gradients.

    Raises:
        ValueError: A DTensor was not laid out by a function of this package, or a parameter is on ``meta`` or given
            twice.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Parameter]],
        *,
        bucket_bytes: int = 32 << 20,
        grad_dtype: torch.dtype = torch.float32,
    ) -> None:
        trained = [[p for p in stage if p.requires_grad] for stage in stages]
        _check(trained)
        self._stages = [_Stage(list(make_buckets(parameters, bucket_bytes, grad_dtype))) for parameters in trained]
        device = next((p.device for parameters in trained for p in parameters), torch.device("cpu"))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_step = False
        handles: list[RemovableHandle] = []
        for stage_index, stage in enumerate(self._stages):
            for index, bucket in enumerate(stage.buckets):
                for parameter, view in zip(bucket.parameters, bucket.views):
                    # The gradient may be wider than the parameter, and comes from backward in either dtype.
                    parameter.grad_dtype = None
                    collect = _collector(weakref.ref(self), stage_index, index, view)
                    handles.append(parameter.register_post_accumulate_grad_hook(collect))
        # Parameters hold their hooks: these must hold neither this nor, through it, the parameters.
        weakref.finalize(self, _remove, handles)

    @contextmanager
    def microbatch(self, stage: int, *, last: bool) -> Generator[None]:
        """Collect the gradients of one microbatch's backward.

        Args:
            stage: Index into ``stages``.
            last: Whether this is the stage's last microbatch of the step.
        """
        if not self._in_step:
            self._begin()
        current = self._stages[stage]
        current.begin_microbatch(last=last)
        try:
            yield
        except BaseException:
            self._forget()
            raise
        if last:
            current.reduce_ready(self._stream, everything=True)

    def finish(self) -> None:
        """Wait for all sums and set the gradients.

        Raises:
            RuntimeError: A stage has not had its last microbatch.
        """
        if not self._in_step:
            raise RuntimeError("finish() ends a step, and no microbatch has begun one")
        if pending := [i for i, stage in enumerate(self._stages) if not stage.all_reduced]:
            raise RuntimeError(f"stages {pending} have had no microbatch with last=True in this step")
        self._wait()
        for stage in self._stages:
            for bucket in stage.buckets:
                bucket.publish()
        self._in_step = False

    def _wait(self) -> None:
        for stage in self._stages:
            for bucket in stage.buckets:
                bucket.wait()
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _begin(self) -> None:
        # Sums of a step that failed may still be under way. Its failure did not wait for them: it had to be seen.
        self._wait()
        self._in_step = True
        for stage in self._stages:
            stage.reduced = 0
            for bucket in stage.buckets:
                bucket.zero()
                for parameter in bucket.parameters:
                    parameter.grad = None

    def _forget(self) -> None:
        """Leave a failed step: the next one begins anew."""
        self._in_step = False
        for stage in self._stages:
            for bucket in stage.buckets:
                for parameter in bucket.parameters:
                    parameter.grad = None

    def _collect(self, parameter: Tensor, view: Tensor, stage: "_Stage", index: int) -> None:
        assert parameter.grad is not None
        if not self._in_step:
            raise RuntimeError("backward ran outside GradientSync.microbatch: its gradients would be lost")
        if stage.reduced > index:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient after its sum over ranks had "
                "started: run one backward in a stage's last microbatch"
            )
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            found, fixed = parameter.grad.placements, grad_placements(parameter)
            if found != fixed:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} has placements {found}, and is to "
                    f"be {fixed}: use parameters in a loss as module.weight, not as the DTensors of parameters()"
                )
        view.add_(local_tensor(parameter.grad))
        parameter.grad = None
        if stage.is_last:
            stage.missing[index] -= 1
            stage.reduce_ready(self._stream)


def _check(stages: Sequence[Sequence[nn.Parameter]]) -> None:
    seen: set[nn.Parameter] = set()
    for parameter in (p for parameters in stages for p in parameters):
        if parameter.is_meta:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is on meta: materialize the module before making a "
                "GradientSync, since that replaces parameters"
            )
        if parameter in seen:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is given twice: give each once")
        seen.add(parameter)


def _collector(sync: "weakref.ref[GradientSync]", stage: int, index: int, view: Tensor) -> Callable[[Tensor], None]:
    def collect(parameter: Tensor) -> None:
        if (owner := sync()) is not None:
            owner._collect(parameter, view, owner._stages[stage], index)  # noqa: SLF001 - the class's own hook

    return collect


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


@attrs.define
class _Stage:
    buckets: list[Bucket]
    is_last: bool = False
    missing: list[int] = attrs.field(factory=list)
    """For each bucket, how many parameters the last microbatch has not reached yet."""
    reduced: int = 0
    """How many buckets, from the first, are being summed. One order on all ranks, or collectives would cross."""

    def begin_microbatch(self, *, last: bool) -> None:
        self.is_last = last
        self.missing = [len(bucket.parameters) for bucket in self.buckets]

    @property
    def all_reduced(self) -> bool:
        return self.reduced == len(self.buckets)

    def reduce_ready(self, stream: torch.cuda.Stream | None, *, everything: bool = False) -> None:
        while not self.all_reduced and (everything or not self.missing[self.reduced]):
            self.buckets[self.reduced].reduce_async(stream)
            self.reduced += 1
