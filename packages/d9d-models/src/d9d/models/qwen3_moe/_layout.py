"""How a Qwen3-MoE lies on the meshes of a job."""

from collections.abc import Sequence

import attrs
from torch import nn
from torch.distributed.fsdp import FSDPModule

from d9d.mesh import DistContext
from d9d.parallel import (
    ShardPolicy,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    prefetch,
)

from ._model import Qwen3MoEForCausalLM


def parallelize_qwen3_moe(
    model: Qwen3MoEForCausalLM, context: DistContext, *, policy: ShardPolicy | None = None
) -> None:
    """Split the experts of a model or stage over ``ep``, and hold everything else on every data rank or shard it.

    With ``mesh.shard`` every layer is one unit of `fully_shard`, and so are the final norm with the head and what is
    left; a tied head stays with the embedding. In a pipeline units are gathered for a step.

    Args:
        model: Changed in place; may be on ``meta``.
        context: Degrees and meshes of the job.
        policy: For ``mesh.shard``.

    Raises:
        ValueError: The job has degrees that this layout does not serve, or its ``expert`` does not divide the experts.
    """
    config = context.config
    degrees = {"context": config.context, "tensor": config.tensor}
    if unserved := [f"mesh.{name} = {degree}" for name, degree in degrees.items() if degree > 1]:
        raise ValueError(
            f"{', '.join(unserved)}: Qwen3-MoE is laid out over pipeline, replicate, shard and expert so far"
        )
    is_sharded = config.shard > 1
    policy = (policy or ShardPolicy()) if is_sharded else None
    if policy and config.pipeline > 1:
        policy = attrs.evolve(policy, gathered_for="step")
    if config.expert > 1:
        experts = context.mesh("expert")["ep_replicate", "ep_shard", "ep"]
        for layer in model.decoder_layers():
            parallelize_expert_parallel(layer.moe, experts, policy=policy)
    dense = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
    if not is_sharded:
        parallelize_replicate(model, dense)
        return
    # The head's gradient is ready first, the embedding's last: in one unit the sum of both would wait for the latter.
    units: list[nn.Module | Sequence[nn.Module]] = [*model.decoder_layers()]
    if model.stage.is_last and not (model.stage.is_first and model.config.tie_embeddings):
        units.append([model.norm, model.head])
    units.append(model)
    for unit in units:
        if config.replicate == 1:
            parallelize_fsdp(unit, dense["dp_cp_shard"], policy=policy)
        else:
            parallelize_hsdp(unit, dense, shard_dim="dp_cp_shard", policy=policy)
    # Experts are units of their own, within their layer's. Their dispatch waits for the device, so that the host does
    # not run ahead of it.
    within_layers = (module for layer in model.decoder_layers() for module in layer.modules())
    prefetch([module for module in within_layers if isinstance(module, FSDPModule)])
