"""The norm of all gradients, and of groups of them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ._layout import local_tensor
from ._mesh_dims import MeshDims, Parameters, named, split_of_gradient


def global_norm(
    parameters: Parameters,
    *,
    norm_type: float = 2.0,
    pp_group: ProcessGroup | None = None,
    tied: Collection[nn.Parameter] = (),
) -> Tensor:
    """The norm of the gradients of a whole model, as if it lay on one rank.

    Every element counts once: shards are summed over the mesh dims that split them, replicas are not. The number
    of collectives depends on the meshes and not on the number of tensors. A NaN or an infinity anywhere makes a norm
    that is not finite, of any type, on every rank.

    Args:
        parameters: All parameters that this rank holds, with or without names, in one order on all ranks; those
            without a gradient are skipped.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.
        pp_group: Ranks that hold the other stages of the model.
        tied: Parameters that another stage counts.

    Returns:
        0-dim fp64, on the device of the gradients; 0 if there are none.

    Raises:
        ValueError: A gradient is Partial, that is, not yet summed over ranks, or ``norm_type`` is not positive.
    """
    (norm,) = group_norms({"": parameters}, norm_type=norm_type, pp_group=pp_group, tied=tied).values()
    return norm


@torch.no_grad()
def group_norms(
    groups: Mapping[str, Parameters],
    *,
    norm_type: float = 2.0,
    pp_group: ProcessGroup | None = None,
    tied: Collection[nn.Parameter] = (),
) -> dict[str, Tensor]:
    """As `global_norm`, one norm for each group, in the same number of collectives.

    Args:
        groups: Parameters by the name of their group: the same names in one order on all ranks, also of other stages;
            a group may be empty on some.
        norm_type: As there.
        pp_group: As there.
        tied: As there.

    Raises:
        ValueError: As there.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type is {norm_type!r}: a norm needs a positive p, or inf")
    skipped = set(tied)
    device = None
    by_split: dict[MeshDims, list[list[Tensor]]] = {}
    for place, parameters in enumerate(groups.values()):
        for name, parameter in named(parameters):
            if parameter in skipped:
                continue
            device = device or parameter.device
            # By parameter: a rank without a gradient takes part in the same collectives as the others.
            parts = by_split.setdefault(split_of_gradient(parameter, name), [[] for _ in groups])
            if parameter.grad is not None:
                parts[place].append(local_tensor(parameter.grad))
    if device is None and pp_group is not None and "cuda:" in dist.get_backend_config(pp_group):
        # The stages of this rank have nothing to count, and those of others reduce where their gradients are.
        device = torch.device("cuda", torch.cuda.current_device())
    is_max = math.isinf(norm_type)
    reduce_op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    # fp64: a sum over layers, shards and stages shall not depend on its order.
    total = torch.zeros(len(groups), dtype=torch.float64, device=device)
    for split, parts in by_split.items():
        part = torch.stack([_power_sum(tensors, norm_type, total.device) for tensors in parts])
        for group in split.groups():
            dist.all_reduce(part, reduce_op, group=group)
        total = torch.maximum(total, part) if is_max else total + part
    if pp_group is not None:
        dist.all_reduce(total, reduce_op, group=pp_group)
    norms = total if is_max else total ** (1.0 / norm_type)
    return dict(zip(groups, norms.unbind()))


def total_norm(norms: Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients from those of groups that share none, without communication.

    Args:
        norms: Values of `group_norms`, at least one.
        norm_type: The one they were made with.
    """
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return total


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
