"""Sharded data parallelism: ranks share one copy of the parameters and see different data."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ._layout import is_laid_out

_FULLY_SHARDED = "_d9d_fully_sharded"


@attrs.frozen(kw_only=True)
class ShardPolicy:
    """How sharded parameters are stored, gathered and reduced.

    The parameters' own dtype is that of the shards, of the reduced gradients, and of their sum over microbatches: keep
    them in fp32 (or fp64) and compute in bf16.
    """

    compute_dtype: torch.dtype | None = torch.bfloat16
    """Of the gathered parameters, hence of the matrix products; ``None``: as stored. Inputs of modules are not cast."""

    reduce_dtype: torch.dtype | None = torch.float32
    """In which gradients are summed over ranks; ``None``: ``compute_dtype``."""

    reshard_after_forward: bool = True
    """Whether to free gathered parameters after forward and gather them again for backward."""


def parallelize_fsdp(
    modules: nn.Module | Sequence[nn.Module], mesh: DeviceMesh, *, policy: ShardPolicy | None = None
) -> None:
    """Shard the parameters of a module over a mesh of one dim, as one unit that is gathered and freed together.

    This is `torch.distributed.fsdp.fully_shard` with gradients *summed* over ranks, which no other code then needs to
    do: `GradientSync` refuses these parameters, `global_norm` and `scale_and_clip_` take them. Call it on inner modules
    (blocks) first and on the whole model last: each unit takes what inner ones have not. Parameters that another
    parallelize function has laid out are left alone.

    Gradients accumulate in the shards over microbatches, one reduction each; clear them before a step
    (``parameter.grad = None``).

    Args:
        modules: One, or several that make one unit (an embedding and the head that is tied to it); changed in place;
            may be on ``meta``. Each returns tensors, alone or in tuples, lists, dicts or dataclasses.
        mesh: Ranks that share the parameters.
        policy: Dtypes and when to free.

    Raises:
        ValueError: The mesh has more than one dim, or a module is such a unit already.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_fsdp takes a mesh of one dim, got {mesh.mesh_dim_names}: parallelize_hsdp takes two"
        )
    _shard(modules, mesh, policy or ShardPolicy())


def parallelize_hsdp(
    modules: nn.Module | Sequence[nn.Module], mesh: DeviceMesh, *, shard_dim: str, policy: ShardPolicy | None = None
) -> None:
    """Shard parameters over one dim of a mesh and hold copies over the other; otherwise as `parallelize_fsdp`.

    Args:
        modules: As there.
        mesh: Of two dims, that of copies first.
        shard_dim: Name of the dim that shares the parameters.
        policy: As there.

    Raises:
        ValueError: The mesh is another one, or a module is such a unit already.
    """
    if mesh.ndim != 2 or mesh.mesh_dim_names is None or mesh.mesh_dim_names[1] != shard_dim:
        raise ValueError(f"parallelize_hsdp takes a mesh of two dims, {shard_dim!r} last, got {mesh.mesh_dim_names}")
    _shard(modules, mesh, policy or ShardPolicy())


def shard_further(
    owner: nn.Module, parameters: Collection[nn.Parameter], mesh: DeviceMesh, policy: ShardPolicy
) -> None:
    """Shard parameters that are split on dim 0 already: on dim 1 where it divides evenly, else on dim 0 once more.

    Args:
        owner: A module that owns some of them, whose forward uses them.
        parameters: What to shard; whatever else the module holds is left alone.
        mesh: Its last dim shares the parameters, one before it holds copies.
        policy: As in `parallelize_fsdp`.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard:
        is_even = parameter.ndim > 1 and parameter.shape[1] % ranks == 0
        return Shard(1 if is_even else 0)

    ignored = {p for p in owner.parameters() if p not in parameters}
    _fully_shard([owner], mesh, policy, ignored, placement)


def is_fully_sharded(parameter: nn.Parameter) -> bool:
    """Whether `fully_shard` owns a parameter that a function of this package laid out, and sums its gradient."""
    return _FULLY_SHARDED in vars(parameter)


def _shard(modules: nn.Module | Sequence[nn.Module], mesh: DeviceMesh, policy: ShardPolicy) -> None:
    unit = [modules] if isinstance(modules, nn.Module) else list(modules)
    _fully_shard(unit, mesh, policy, {p for module in unit for p in module.parameters() if is_laid_out(p)})


def _fully_shard(
    unit: list[nn.Module],
    mesh: DeviceMesh,
    policy: ShardPolicy,
    ignored: set[nn.Parameter],
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
) -> None:
    for module in unit:
        if isinstance(module, FSDPModule):
            # torch takes it without a word.
            raise ValueError(  # noqa: TRY004 - the type is right, the state is not
                f"{type(module).__name__} is a unit of fully_shard already: shard modules within or around it"
            )
    fully_shard(
        unit if len(unit) > 1 else unit[0],
        mesh=mesh,
        reshard_after_forward=policy.reshard_after_forward,
        # Inputs stay as they are: fully_shard would cast rotary tables and the like along with activations.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=policy.compute_dtype, reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False
        ),
        ignored_params=ignored,
        shard_placement_fn=placement,
    )
    for module in unit:
        assert isinstance(module, FSDPModule)
        module.register_forward_hook(_refuse_hidden_tensors)
        # Neither reaches the modules within, so each call sets its own.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
        for parameter in module.parameters():
            if isinstance(parameter, DTensor) and not is_laid_out(parameter):
                vars(parameter)[_FULLY_SHARDED] = True


def _refuse_hidden_tensors(module: nn.Module, arguments: object, output: object) -> None:
    """Raise where `fully_shard` would not find a tensor: backward would then read parameters that were freed."""
    del arguments
    match output:
        case Tensor() | None | bool() | int() | float() | str():
            return
        case tuple() | list():
            parts: Iterable[object] = output
        case dict():
            parts = output.values()
        case _ if is_dataclass(output):
            parts = [getattr(output, field.name) for field in fields(output)]
        case _:
            raise TypeError(
                f"{type(module).__name__} returned a {type(output).__name__}, in which fully_shard finds no tensors: "
                "return them in a tuple, list, dict or dataclass"
            )
    for part in parts:
        _refuse_hidden_tensors(module, None, part)
