"""Sharded data parallelism: ranks share one copy of the parameters and see different data."""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Literal

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ._layout import is_laid_out, local_tensor
from ._wide_sums import WideSums, is_narrow

_FULLY_SHARDED = "_d9d_fully_sharded"
_GATHERED_FOR_STEP = "_d9d_gathered_for_step"


@attrs.frozen(kw_only=True)
class ShardPolicy:
    """How sharded parameters are gathered and their gradients reduced.

    Shards have the parameters' own dtype: fp32 shards under bf16 compute are the usual choice, and bf16 shards take
    half the memory. Gradients of either have at least fp32, and are summed over microbatches in it.
    """

    compute_dtype: torch.dtype | None = torch.bfloat16
    """Of the gathered parameters, hence of the matrix products; ``None``: as stored. Inputs of modules are not cast."""

    reduce_dtype: torch.dtype | None = torch.float32
    """In which gradients are summed over ranks; ``None``: ``compute_dtype``."""

    gathered_for: Literal["pass", "microbatch", "step"] = "pass"
    """How long a unit stays gathered: for one pass through it, and gathered again for backward; from its forward to
    its backward; or, under `sharded_microbatch`, over all microbatches of a step. The outermost unit, which backward
    needs first, is never freed between the two passes."""


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
        policy: Dtypes and how long to keep what is gathered.

    Raises:
        ValueError: The mesh has more than one dim, or a module is such a unit already, or a unit within holds
            parameters that neither it nor this one would own.
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


@contextmanager
def sharded_microbatch(module: nn.Module, *, last: bool) -> Generator[None]:
    """Run one microbatch, forward and backward, of a module with units that are gathered for a step.

    They stay gathered afterwards unless it is the last microbatch of the step, or fails. Other modules see no
    difference.

    Args:
        module: The whole model.
        last: Whether this is the step's last microbatch, after which the optimizer changes the shards.
    """
    units = [m for m in module.modules() if isinstance(m, FSDPModule) and is_gathered_for_step(m)]
    for unit in units:
        unit.set_reshard_after_backward(last, recurse=False)
    try:
        yield
    except BaseException:
        # An interrupt too: what stays gathered would hide a later change of the shards.
        for unit in units:
            unit.reshard()
        raise


def prefetch(units: Sequence[nn.Module], *, forward: int = 1, backward: int = 1) -> None:
    """Have units gathered while those before them compute, also where the host does not run ahead of the device.

    Args:
        units: In the order in which forward runs through them, each of which a parallelize function made a unit.
        forward: How many units ahead to gather in forward.
        backward: The same in backward, against the order.

    Raises:
        ValueError: A module is no unit.
    """
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    if strangers := [type(unit).__name__ for unit in units if not isinstance(unit, FSDPModule)]:
        raise ValueError(f"{strangers} are no units of fully_shard: give the modules that were sharded, in their order")
    for i, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + forward])
        unit.set_modules_to_backward_prefetch(sharded[max(0, i - backward) : i][::-1])


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


def is_gathered_for_step(unit: FSDPModule) -> bool:
    """Whether a unit was laid out to stay gathered for a step."""
    return _GATHERED_FOR_STEP in vars(unit)


def _shard(modules: nn.Module | Sequence[nn.Module], mesh: DeviceMesh, policy: ShardPolicy) -> None:
    unit = [modules] if isinstance(modules, nn.Module) else list(modules)
    _refuse_orphans(unit)
    _fully_shard(unit, mesh, policy, {p for module in unit for p in module.parameters() if is_laid_out(p)})


def _refuse_orphans(unit: Sequence[nn.Module]) -> None:
    """Raise where an inner unit holds a parameter that it does not own, and that this unit would not take either."""
    for inner in (inner for module in unit for inner in module.modules() if isinstance(inner, FSDPModule)):
        assert isinstance(inner, nn.Module)
        orphans = [name for name, parameter in inner.named_parameters() if not isinstance(parameter, DTensor)]
        if orphans:
            raise ValueError(
                f"{', '.join(orphans)} lies in {type(inner).__name__}, a unit of fully_shard that does not own it, so "
                "that no unit around it will: shard the module that holds it first"
            )


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
    owned = list(_owned(unit, ignored))
    wide_sums = None
    if any(is_narrow(parameter.dtype) for _, _, parameter in owned):
        ranks = mesh.size(mesh.ndim - 1)
        wide_sums = WideSums(
            [(o, n, _largest_shard(p, ranks, placement(p) if placement else None)) for o, n, p in owned]
        )
    fully_shard(
        unit if len(unit) > 1 else unit[0],
        mesh=mesh,
        reshard_after_forward=None if policy.gathered_for == "pass" else False,
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
        if hasattr(module, "set_reduce_scatter_unused_params"):
            # Ranks that used different parameters would wait for each other. torch 2.11 has no such switch.
            module.set_reduce_scatter_unused_params(True, recurse=False)
        if policy.gathered_for == "step":
            vars(module)[_GATHERED_FOR_STEP] = True
    for owner, name, _ in owned:
        vars(owner.get_parameter(name))[_FULLY_SHARDED] = True
    if wide_sums:
        assert isinstance(unit[0], FSDPModule)
        wide_sums.install(unit[0])


def _owned(
    unit: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> Generator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that a unit will own, each once: where they are, and what they are before."""
    seen: set[nn.Parameter] = set(ignored)
    for owner in (owner for module in unit for owner in module.modules()):
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in seen and not is_fully_sharded(parameter):
                seen.add(parameter)
                yield owner, name, parameter


def _largest_shard(parameter: nn.Parameter, ranks: int, placement: Shard | None) -> int:
    """Elements of the largest shard when a parameter is cut for so many ranks."""
    shape = local_tensor(parameter).shape
    dim = placement.dim if placement else 0
    return -(-shape[dim] // ranks) * (shape.numel() // max(shape[dim], 1))


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
