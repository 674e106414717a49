"""How a Qwen3-MoE lies on the meshes of a job."""

from d9d.mesh import DistContext
from d9d.parallel import parallelize_expert_parallel, parallelize_replicate

from ._model import Qwen3MoEForCausalLM


def parallelize_qwen3_moe(model: Qwen3MoEForCausalLM, context: DistContext) -> None:
    """Split the experts over ``ep`` and hold everything else on every data rank.

    Args:
        model: Changed in place; may be on ``meta``.
        context: Degrees and meshes of the job.

    Raises:
        ValueError: The job has degrees that this layout does not serve, or its ``expert`` does not divide the experts.
    """
    config = context.config
    degrees = {"pipeline": config.pipeline, "shard": config.shard, "context": config.context, "tensor": config.tensor}
    if unserved := [f"mesh.{name} = {degree}" for name, degree in degrees.items() if degree > 1]:
        raise ValueError(f"{', '.join(unserved)}: only replicate and expert can be larger than 1 for Qwen3-MoE so far")
    experts = context.mesh("expert")["ep_replicate", "ep_shard", "ep"]
    if config.expert > 1:
        for layer in model.decoder_layers():
            parallelize_expert_parallel(layer.moe, experts)
    parallelize_replicate(model, context.mesh("dense")["dp_replicate", "dp_cp_shard"])
