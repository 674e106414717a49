"""The one multiplication that applies weight and clipping, and what happens where gradients are not finite."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._layout import local_tensor
from ._mesh_dims import MeshDims, Parameters, named, split_of_gradient

NonFinite: TypeAlias = Literal["raise", "skip", "zero"]
"""What to do with a step whose gradients hold a NaN or an infinity, see `scale_and_clip_`."""

# A model that diverged has them everywhere.
_MOST_NAMED = 8


@torch.no_grad()
def scale_and_clip_(
    parameters: Parameters,
    *,
    weight: Tensor,
    norm: Tensor,
    max_norm: float | None,
    nonfinite: NonFinite = "raise",
) -> bool:
    """Turn gradients of a summed loss into clipped gradients of its mean, in one pass over them.

    Multiplies by ``min(1, max_norm · weight / norm) / weight``. Where ``weight`` or ``max_norm`` is 0 the gradients
    become 0.

    A norm that is not finite is dealt with as ``nonfinite`` says, alike on all ranks since the norm is that of all:

    - ``"raise"``: `FloatingPointError` on every rank, which names the parameters; gradients stay as they are.
    - ``"skip"``: gradients are dropped (``None``), and no step shall be made.
    - ``"zero"``: gradients become 0, and the step is made: momentum and weight decay still act. Nothing is read back
      to the host, for one more pass over the gradients.

    "raise" and "skip" read the norm back, so the host waits for the device.

    Args:
        parameters: With names, for errors, or without; in one order on all ranks. Those without a gradient are
            skipped.
        weight: Global weight of the loss, 0-dim.
        norm: Norm of the gradients as they are, of the *sum*; 0-dim, from `global_norm`.
        max_norm: Largest norm of the gradients of the *mean*; ``None`` does not clip.
        nonfinite: What to do where the norm is not finite.

    Returns:
        Whether to make the optimizer step.

    Raises:
        FloatingPointError: The norm is not finite, and ``nonfinite`` is "raise".
    """
    held = named(parameters)
    gradients = [local_tensor(parameter.grad) for _, parameter in held if parameter.grad is not None]
    match nonfinite:
        case "raise":
            if not norm.isfinite():
                raise FloatingPointError(_report(held, norm))
        case "skip":
            if not norm.isfinite():
                for _, parameter in held:
                    parameter.grad = None
                return False
        case "zero":
            # A NaN times 0 is a NaN.
            is_bad = norm.isfinite().logical_not()
            for gradient in gradients:
                gradient.masked_fill_(is_bad, 0.0)
        case _:
            assert_never(nonfinite)
    _scale(gradients, weight=weight.to(torch.float64), norm=norm.to(torch.float64), max_norm=max_norm)
    return True


def _scale(gradients: Sequence[Tensor], *, weight: Tensor, norm: Tensor, max_norm: float | None) -> None:
    scale = 1.0 / weight
    if max_norm is not None:
        scale = torch.where(norm > max_norm * weight, max_norm / norm, scale)
    scale = torch.where(weight > 0, scale, 0.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, of_dtype in by_dtype.items():
        # The multi-tensor form takes a scale of the gradients' own precision.
        torch._foreach_mul_(of_dtype, scale.to(torch.promote_types(dtype, torch.float32)))


def _report(parameters: Sequence[tuple[str, nn.Parameter]], norm: Tensor) -> str:
    """Which gradients hold how many NaNs and infinities, the same on all ranks of a stage; collective."""
    by_split: dict[MeshDims, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        by_split.setdefault(split_of_gradient(parameter, name), []).append((name, parameter))
    found: dict[str, str] = {}
    for split, members in by_split.items():
        counts = torch.stack([_count(parameter.grad, norm.device) for _, parameter in members])
        for group in split.groups():
            dist.all_reduce(counts, group=group)
        for (name, parameter), (nans, infinities) in zip(members, counts.tolist()):
            if nans or infinities:
                found[name] = (
                    f"{name} of shape {tuple(parameter.shape)} ({nans} NaN and {infinities} infinite of "
                    f"{parameter.numel()} elements)"
                )
    ordered = [found[name] for name, _ in parameters if name in found]
    named_ones = "; ".join(ordered[:_MOST_NAMED]) or "no gradient of this stage, so in another stage, or by overflow"
    more = f"; and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
    return (
        f"the norm of the gradients is {norm.item()}, from {named_ones}{more}. The step was not made: look at the "
        'batch and the learning rate, or go on without such steps by nonfinite="skip" or "zero"'
    )


def _count(gradient: Tensor | None, device: torch.device) -> Tensor:
    if gradient is None:
        return torch.zeros(2, dtype=torch.int64, device=device)
    local = local_tensor(gradient)
    return torch.stack([local.isnan().sum(), local.isinf().sum()]).to(device)
