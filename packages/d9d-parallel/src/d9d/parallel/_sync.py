"""Gradients summed over microbatches and ranks."""

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ._bucket import Bucket, plan_buckets
from ._layout import LocalLeaf, laid_out_as, local_tensor


class GradientSync:
    """Sums gradients over the microbatches of a step and over the ranks that hold addends of them.

    Backward accumulates into flat buffers of a wide dtype. When it has filled a buffer for the last time in a step, the
    buffer's sum over the ranks starts, on CUDA on a stream of its own while backward goes on. Exactly the mesh
    dims over which a parameter's gradient is Partial are summed; nothing is divided. All ranks reduce buffers in one
    order, whatever parameters each of them used, and an unused parameter counts as zeros.

    A step is::

        for i, batch in enumerate(microbatches):
            with sync.microbatch(0, last=i == len(microbatches) - 1):
                loss(model, batch).backward()
        sync.finish()

    Afterwards every parameter's ``grad`` is summed, of dtype ``grad_dtype``, and laid out as the parameter; it is a
    view of a buffer, and valid until the next step begins, which starts from zero. A step that raises is forgotten as
    a whole. While this object lives, ``module.weight`` of a laid-out parameter is a leaf of autograd, and hooks on
    gradients belong there: those on the parameter are not called.

    Args:
        stages: The parameters of each pipeline stage on this rank; frozen ones are skipped.
        bucket_bytes: Size at which a buffer is closed.
        grad_dtype: Of the buffers and the gradients.

    Raises:
        ValueError: A DTensor was not laid out by a function of this package, only a part of a stage was laid out, a
            parameter is on ``meta`` or given twice, or there are several devices.
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
        device = next((p.device for parameters in trained for p in parameters), torch.device("cpu"))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_step = False
        self._stages: list[_Stage] = []
        self._gradients: list[_Gradient] = []
        handles: list[RemovableHandle] = []
        for parameters in trained:
            stage = _Stage(self._stream)
            self._stages.append(stage)
            for index, plan in enumerate(plan_buckets(parameters, bucket_bytes, grad_dtype)):
                shapes = [local_tensor(parameter).shape for parameter in plan.parameters]
                bucket = Bucket(shapes, plan.groups, grad_dtype, device)
                stage.buckets.append(bucket)
                for parameter, view in zip(plan.parameters, bucket.views):
                    gradient = _Gradient(parameter, view)
                    self._gradients.append(gradient)
                    collect = _collector(stage, index, view)
                    handles.append(gradient.leaf.register_post_accumulate_grad_hook(collect))
                    if gradient.leaf is not parameter:
                        handles.append(parameter.register_post_accumulate_grad_hook(_refuse))
        # Parameters hold their hooks and leaves: these must hold neither this nor, through it, the parameters.
        leaves = [gradient.local for gradient in self._gradients if gradient.local is not None]
        weakref.finalize(self, _release, handles, leaves)

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
            self.abandon()
            raise
        current.end_microbatch()

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
        for gradient in self._gradients:
            gradient.publish()
        self._in_step = False

    def abandon(self) -> None:
        """Forget a step that failed between two microbatches: the next one begins anew."""
        self._in_step = False
        for stage in self._stages:
            stage.collects = False
        for gradient in self._gradients:
            gradient.parameter.grad = None

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
            stage.begin_step()
        for gradient in self._gradients:
            gradient.begin_step()


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
    if len(devices := {parameter.device for parameter in seen}) > 1:
        raise ValueError(f"the parameters are on {sorted(map(str, devices))}: a GradientSync takes those of one device")
    for parameters in stages:
        plain = [tuple(p.shape) for p in parameters if not isinstance(p, DTensor)]
        if 0 < len(plain) < len(parameters):
            raise ValueError(
                f"some parameters of a stage are laid out, and those of shapes {plain} are not: nobody would sum their "
                "gradients; lay out the whole model, or nothing of it"
            )


class _Gradient:
    """One trained parameter, and the view of a buffer in which its gradient is summed."""

    def __init__(self, parameter: nn.Parameter, view: Tensor) -> None:
        self.parameter = parameter
        self.local = LocalLeaf(parameter) if isinstance(parameter, DTensor) else None
        self.leaf: Tensor = parameter
        """Where backward accumulates."""
        self._view = view
        self._published = view
        if self.local is not None and isinstance(parameter, DTensor):
            assert self.local.tensor is not None
            self.leaf = self.local.tensor
            self._published = laid_out_as(parameter, view)
        # The gradient may be wider than the parameter, and comes from backward in either dtype.
        parameter.grad_dtype = None
        self.leaf.grad_dtype = None

    def begin_step(self) -> None:
        if self.local is not None:
            assert isinstance(self.parameter, DTensor)
            if not self.local.is_used(self.parameter):
                raise RuntimeError(
                    f"a parameter of shape {tuple(self.parameter.shape)} was converted, or given to another "
                    "GradientSync, after this one was made: make a GradientSync when the module is as it stays"
                )
            self.parameter.grad = None
        self.leaf.grad = self._view

    def publish(self) -> None:
        self.parameter.grad = self._published


class _Stage:
    """Counts the parameters that backward reaches, and reduces buckets in their order."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.buckets: list[Bucket] = []
        self._stream = stream
        self.collects = False
        """Whether a microbatch is under way."""
        self.is_last = False
        self._missing: list[int] = []
        """For each bucket, how many parameters the last microbatch has not reached yet."""
        self._reduced = 0
        """How many buckets, from the first, are being summed. One order on all ranks, or collectives would cross."""

    @property
    def all_reduced(self) -> bool:
        return self._reduced == len(self.buckets)

    def begin_step(self) -> None:
        self._reduced = 0
        for bucket in self.buckets:
            bucket.zero()

    def begin_microbatch(self, *, last: bool) -> None:
        self.collects, self.is_last = True, last
        self._missing = [len(bucket.views) for bucket in self.buckets]

    def end_microbatch(self) -> None:
        self.collects = False
        if self.is_last:
            self._reduce_ready(everything=True)

    def arrive(self, leaf: Tensor, index: int) -> None:
        """Take note of a gradient in a bucket that is reduced when all are there, or ought not to get any more."""
        if not self.collects:
            raise RuntimeError("backward ran outside GradientSync.microbatch: its gradients would be lost")
        if self._reduced > index:
            raise RuntimeError(
                f"a parameter of local shape {tuple(leaf.shape)} got a gradient after its sum over ranks had started: "
                "run one backward in a stage's last microbatch"
            )
        self._missing[index] -= 1
        if not self._missing[index]:
            self._reduce_ready()

    def _reduce_ready(self, *, everything: bool = False) -> None:
        while not self.all_reduced and (everything or not self._missing[self._reduced]):
            self.buckets[self._reduced].reduce_async(self._stream)
            self._reduced += 1


def _collector(stage: _Stage, index: int, view: Tensor) -> Callable[[Tensor], None]:
    """A hook for after each accumulation; it costs less than a microsecond but for the last microbatch."""

    def collect(leaf: Tensor) -> None:
        if leaf.grad is not view:
            # Backward with create_graph, or after someone set another gradient, does not accumulate in place.
            assert leaf.grad is not None
            view.copy_(leaf.grad.detach())
            leaf.grad = view
        if stage.is_last or not stage.collects:
            stage.arrive(leaf, index)

    return collect


def _refuse(parameter: Tensor) -> None:
    parameter.grad = None
    raise RuntimeError(
        f"a loss used a parameter of shape {tuple(parameter.shape)} as a DTensor, whose gradient is no addend that "
        "could be summed: use it as module.weight, not as parameters() gives it"
    )


def _release(handles: Sequence[RemovableHandle], leaves: Sequence[LocalLeaf]) -> None:
    for handle in handles:
        handle.remove()
    for leaf in leaves:
        leaf.release()
