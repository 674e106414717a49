"""The norm of all gradients, and the one multiplication that applies weight and clipping."""

import math
from collections.abc import Collection, Iterable, Sequence
from functools import reduce

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ._layout import local_tensor


@torch.no_grad()
def global_norm(
    parameters: Iterable[nn.Parameter],
    *,
    norm_type: float = 2.0,
    pp_group: ProcessGroup | None = None,
    tied: Collection[nn.Parameter] = (),
) -> Tensor:
    """The norm of the gradients of a whole model, as if it lay on one rank.

    Every element counts once: shards are summed over the mesh dims that split them, replicas are not. The number
    of collectives depends on the meshes and not on the number of tensors. A gradient that is not finite makes a norm
    that is not finite.

    Args:
        parameters: All parameters that this rank holds, in one order on all ranks; those without a gradient are
            skipped.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.
        pp_group: Ranks that hold the other stages of the model.
        tied: Parameters that another stage counts.

    Returns:
        0-dim fp64, on the device of the gradients; 0 if there are none.

    Raises:
        ValueError: A gradient is Partial, that is, not yet summed over ranks, or ``norm_type`` is not positive.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type is {norm_type!r}: a norm needs a positive p, or inf")
    skipped = set(tied)
    counted = [p for p in parameters if p not in skipped]
    # By parameter: a rank without a gradient takes part in the same collectives as the others.
    by_split: dict[_Split, list[Tensor]] = {}
    for parameter in counted:
        gradient = parameter.grad
        tensors = by_split.setdefault(_split(parameter if gradient is None else gradient), [])
        if gradient is not None:
            tensors.append(local_tensor(gradient))
    is_max = math.isinf(norm_type)
    reduce_op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    # fp64: a sum over layers, shards and stages shall not depend on its order.
    total = torch.zeros((), dtype=torch.float64, device=counted[0].device if counted else None)
    for split, tensors in by_split.items():
        part = _power_sum(tensors, norm_type, total.device)
        for group in split.groups():
            dist.all_reduce(part, reduce_op, group=group)
        total = torch.maximum(total, part) if is_max else total + part
    if pp_group is not None:
        dist.all_reduce(total, reduce_op, group=pp_group)
    return total if is_max else total ** (1.0 / norm_type)


@torch.no_grad()
def scale_and_clip_(
    parameters: Iterable[nn.Parameter], *, weight: Tensor, norm: Tensor, max_norm: float | None
) -> None:
    """Turn gradients of a summed loss into clipped gradients of its mean, in one pass over them.

    Multiplies by ``min(1, max_norm · weight / norm) / weight``, without reading anything back to the host. Where
    ``weight`` or ``max_norm`` is 0 the gradients become 0. A norm that is not finite leaves gradients that are not
    finite, or 0: check the norm before, if such a step shall be skipped.

    Args:
        parameters: Those without a gradient are skipped.
        weight: Global weight of the loss, 0-dim.
        norm: Norm of the gradients as they are, of the *sum*; 0-dim.
        max_norm: Largest norm of the gradients of the *mean*; ``None`` does not clip.
    """
    weight, norm = weight.to(torch.float64), norm.to(torch.float64)
    scale = 1.0 / weight
    if max_norm is not None:
        scale = torch.where(norm > max_norm * weight, max_norm / norm, scale)
    scale = torch.where(weight > 0, scale, 0.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(local_tensor(parameter.grad))
    for dtype, gradients in by_dtype.items():
        # The multi-tensor form takes a scale of the gradients' own precision.
        torch._foreach_mul_(gradients, scale.to(torch.promote_types(dtype, torch.float32)))


@attrs.frozen
class _Split:
    """Over which dims of which mesh a tensor is split."""

    mesh: DeviceMesh | None = None
    dims: tuple[int, ...] = ()

    def groups(self) -> list[ProcessGroup]:
        return [self.mesh.get_group(dim) for dim in self.dims] if self.mesh else []


def _split(tensor: Tensor) -> _Split:
    if not isinstance(tensor, DTensor):
        return _Split()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"a gradient of shape {tuple(tensor.shape)} has placements {tensor.placements}: its addends are not summed "
            "yet; call GradientSync.finish() first"
        )
    mesh = tensor.device_mesh
    split = (dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))
    return _Split(mesh, tuple(dim for dim in split if mesh.size(dim) > 1))


def _power_sum(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |x|^p over all elements of all tensors, or for p = inf their largest magnitude; fp64."""
    # A shard may be empty, and an empty tensor has no largest element.
    held = [t for t in tensors if t.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    # The norm of a half-precision tensor would be rounded to its dtype.
    dtype = reduce(torch.promote_types, {t.dtype for t in held}, torch.float32)
    norms = torch.stack(torch._foreach_norm(held, norm_type, dtype=dtype)).to(device, torch.float64)  # noqa: SLF001
    if math.isinf(norm_type):
        # A maximum over ranks may lose a NaN.
        return norms.nan_to_num(nan=math.inf, posinf=math.inf).max()
    return norms.pow(norm_type).sum()
