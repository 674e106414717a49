"""The executor's view of a stage that functions of this package laid out."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from .._fsdp import is_fully_sharded, is_gathered_for_step
from .._layout import is_laid_out
from .._sync import GradientSync


class LaidOutStage:
    """Gathers a stage's shards once a step, and sums its gradients over microbatches and ranks.

    What `fully_shard` owns is gathered by `unshard`; its gradients are summed over microbatches in at least fp32, and
    over ranks by `reduce_gradients`. `GradientSync` sums those of all other parameters, bucket by bucket, while the
    last microbatch's backward goes on.

    Units that are not gathered for a step (`ShardPolicy.gathered_for`) go on to gather, free and reduce by themselves,
    in each pass, which takes whole backwards.

    Args:
        module: The stage, laid out and with its memory.
        sync: Holds the parameters that `fully_shard` does not own.
        index: Of this stage in ``sync``.
        splits_backward: Whether gradients of weights are computed apart from those of inputs.

    Raises:
        ValueError: Backward is split, and a unit would be freed between its two parts; or some units are gathered for
            a step and others are not.
    """

    def __init__(self, module: nn.Module, sync: GradientSync, index: int, *, splits_backward: bool) -> None:
        self._module, self._sync, self._index = module, sync, index
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        passing = [type(unit).__name__ for unit in self._units if not is_gathered_for_step(unit)]
        if passing and (splits_backward or len(passing) < len(self._units)):
            raise ValueError(
                f"{', '.join(sorted(set(passing)))} would be freed before its backward is whole, or apart from its "
                'stage: lay out all of the stage with ShardPolicy(gathered_for="step")'
            )
        if passing:
            self._units = []
        self._roots = _outermost(self._units)
        for root in self._roots:
            _finalize_manually(root)
        self._sums: dict[nn.Parameter, Tensor] = {}
        """Of gathered parameters, over the microbatches so far."""
        self._gathers: list[UnshardHandle] = []
        """Under way, or waited for by a hook of `fully_shard`."""
        self._is_hooked = False

    @property
    def is_sharded(self) -> bool:
        """Whether there is anything to gather."""
        return bool(self._units)

    def unshard(self) -> None:
        """Gather the stage's shards, beside what computes now."""
        if not self._units:
            return
        for unit in self._units:
            unit.set_reshard_after_backward(False, recurse=False)
            unit.set_requires_gradient_sync(False, recurse=False)
            handle = unit.unshard(async_op=self._is_hooked)
            if handle is not None:
                self._gathers.append(handle)
        if not self._is_hooked:
            # Gathered parameters are the same objects in every step.
            for parameter in self._module.parameters():
                if parameter.requires_grad and not is_laid_out(parameter):
                    parameter.register_post_accumulate_grad_hook(self._collect)
            self._is_hooked = True

    def reshard(self) -> None:
        """Free what was gathered."""
        self._gathers.clear()
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def weight_gradients(self, *, last: bool) -> Generator[None]:
        """Collect the gradients of one microbatch, whose backward is run in the body.

        Args:
            last: Whether it is the stage's last one of the step.
        """
        # A weight pass runs no hooks of `fully_shard`, and may read what was gathered anew for it.
        while self._gathers:
            self._gathers.pop().wait()
        with self._sync.microbatch(self._index, last=last):
            yield

    def reduce_gradients(self) -> None:
        """Sum what was collected over the ranks that share the stage's parameters."""
        for parameter, total in self._sums.items():
            parameter.grad_dtype = None  # the sum may be wider
            parameter.grad = total
        self._sums.clear()
        for unit in self._units:
            unit.set_requires_gradient_sync(True, recurse=False)
        for root in self._roots:
            _finalize_backward(root)

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._sync.abandon()
        self._sums.clear()
        for parameter in self._module.parameters():
            if not is_laid_out(parameter):
                parameter.grad = None
        for root in self._roots:
            _forget_backward(root)
        self.reshard()

    def _collect(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def sync_stages(
    stages: Mapping[int, nn.Module], *, splits_backward: bool
) -> tuple[GradientSync, dict[int, LaidOutStage]]:
    """Have the gradients of a rank's stages summed over microbatches and ranks.

    Args:
        stages: By number, laid out and with their memory.
        splits_backward: Whether the program does, of which they are the stages.

    Returns:
        The sync of all parameters that `fully_shard` does not own, in fp32 or what is wider among them, to be finished
        after each step; and what the executor takes as ``runtimes``.

    Raises:
        ValueError: As `LaidOutStage` and `GradientSync`.
    """
    parameters = [list(stage.parameters()) for stage in stages.values()]
    grad_dtype = reduce(torch.promote_types, (p.dtype for held in parameters for p in held), torch.float32)
    sync = GradientSync([[p for p in held if not is_fully_sharded(p)] for held in parameters], grad_dtype=grad_dtype)
    return sync, {
        number: LaidOutStage(stage, sync, index, splits_backward=splits_backward)
        for index, (number, stage) in enumerate(stages.items())
    }


def _outermost(units: Sequence[FSDPModule]) -> list[FSDPModule]:
    """The units that lie in no other; torch finalizes a backward for each of them."""
    within = {
        id(inner) for unit in units if isinstance(unit, nn.Module) for inner in unit.modules() if inner is not unit
    }
    return [unit for unit in units if id(unit) not in within]


def _finalize_manually(root: FSDPModule) -> None:
    if hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(True)
    else:
        root.set_is_last_backward(False)


def _finalize_backward(root: FSDPModule) -> None:
    """Have `fully_shard` reduce the gradients that lie in gathered parameters."""
    if hasattr(root, "finalize_backward"):
        root.finalize_backward()
        return
    # torch 2.11 has no public way, and does this in its own pipeline.
    state = root._get_fsdp_state()  # noqa: SLF001
    root.set_is_last_backward(True)
    for each in state._state_ctx.all_states:  # noqa: SLF001
        if each._fsdp_param_group:  # noqa: SLF001
            each._fsdp_param_group.post_backward()  # noqa: SLF001
    state._root_post_backward_final_callback()  # noqa: SLF001
    root.set_is_last_backward(False)


def _forget_backward(root: FSDPModule) -> None:
    """Have `fully_shard` see the end of a backward that raised: autograd drops its callback, and there is no other."""
    state = root._get_fsdp_state()  # noqa: SLF001
    if state._state_ctx.post_backward_final_callback_queued:  # noqa: SLF001
        state._root_post_backward_final_callback()  # noqa: SLF001
