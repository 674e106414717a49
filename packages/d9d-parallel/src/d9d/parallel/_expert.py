"""Expert parallelism: every rank holds some of the experts."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ._fsdp import ShardPolicy, shard_further
from ._layout import Layout, lay_out
from ._protocols import SupportsExpertParallel

_DIMS = ("ep_replicate", "ep_shard", "ep")


def parallelize_expert_parallel(
    moe: SupportsExpertParallel, mesh: DeviceMesh, *, policy: ShardPolicy | None = None
) -> None:
    """Split the experts of one mixture of experts over the ranks of a mesh.

    Expert parameters become DTensors, split on dim 0 over ``ep``; tokens reach their experts through the module's own
    dispatch, which is given the group of ``ep``. A gradient is complete over ``ep``: every token that an expert saw,
    whatever rank it came from. Parameters outside the experts are left alone: lay them out afterwards.

    Without a ``policy`` experts are replicated over ``ep_replicate``, and `GradientSync` sums their gradients there.
    With one, or with ``ep_shard`` above 1, `fully_shard` takes them over: it splits them further over ``ep_shard``, on
    dim 1 where it divides evenly and else on dim 0, and sums their gradients over both dims.

    Args:
        moe: A module with `SupportsExpertParallel`, changed in place; may be on ``meta``.
        mesh: With the dims ``ep_replicate``, ``ep_shard`` and ``ep``, as the "expert" domain of `d9d.mesh` has them.
        policy: As in `parallelize_fsdp`; give it where that function takes the rest of the model.

    Raises:
        TypeError: ``moe`` is not a module with `SupportsExpertParallel`.
        ValueError: The mesh has other dims, or its ``ep`` does not divide the experts, or they are laid out already.
    """
    if not isinstance(moe, nn.Module) or not isinstance(moe, SupportsExpertParallel):
        raise TypeError(
            f"{type(moe).__name__} cannot be expert-parallel: it needs to be an nn.Module with num_experts, "
            "expert_parameters() and set_expert_group()"
        )
    if mesh.mesh_dim_names != _DIMS:
        raise ValueError(f"expert parallelism takes a mesh with the dims {_DIMS}, got {mesh.mesh_dim_names}")
    ep_replicate, ep_shard, ep = mesh.shape
    if moe.num_experts % ep:
        raise ValueError(
            f"{moe.num_experts} experts do not divide over {ep} expert-parallel ranks: "
            f"choose mesh.expert so that it divides {moe.num_experts}"
        )
    experts = set(moe.expert_parameters())
    if not experts <= set(moe.parameters()) or any(isinstance(parameter, DTensor) for parameter in experts):
        raise ValueError(
            f"the experts of {type(moe).__name__} are laid out already: call parallelize_expert_parallel once, and "
            "before any other parallelize function"
        )
    if policy is None and ep_shard == 1:
        replicated = Layout(mesh, (Replicate(), Replicate(), Shard(0)), (Partial(), Partial(), Shard(0)))
        lay_out(moe, lambda parameter: replicated if parameter in experts else None)
    else:
        split = Layout(mesh["ep"], (Shard(0),), (Shard(0),))
        split_experts = lay_out(moe, lambda parameter: split if parameter in experts else None)
        fsdp_mesh = mesh["ep_replicate", "ep_shard"] if ep_replicate > 1 else mesh["ep_shard"]
        for owner in list(moe.modules()):
            if not split_experts.isdisjoint(owner.parameters(recurse=False)):
                shard_further(owner, split_experts, fsdp_mesh, policy or ShardPolicy())
    moe.set_expert_group(mesh.get_group("ep"))
