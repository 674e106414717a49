"""The views of one set of ranks that different parts of a program want."""

from collections.abc import Mapping

from ._config import MeshConfig


def domain_shapes(config: MeshConfig) -> Mapping[str, Mapping[str, int]]:
    """Names and sizes of the mesh dims of every built-in domain, slowest dim first.

    Ranks are numbered with the pipeline slowest, then replicate, shard, context, tensor. Every domain is a reshape
    of that one order:

    - ``dense``: ``pp, dp_replicate, dp_cp_shard, tp``, for parameters outside experts;
    - ``batch``: ``pp, dp, cp, tp``, for data, losses and counters;
    - ``expert``: ``pp, ep_replicate, ep_shard, ep``, for the parameters of experts;
    - ``world``: one dim.

    Args:
        config: Resolved degrees (no -1).
    """
    ep_replicate, ep_shard, ep = config.fold_experts()
    return {
        "dense": {
            "pp": config.pipeline,
            "dp_replicate": config.replicate,
            "dp_cp_shard": config.shard * config.context,
            "tp": config.tensor,
        },
        "batch": {
            "pp": config.pipeline,
            "dp": config.replicate * config.shard,
            "cp": config.context,
            "tp": config.tensor,
        },
        "expert": {"pp": config.pipeline, "ep_replicate": ep_replicate, "ep_shard": ep_shard, "ep": ep},
        "world": {
            "world": config.pipeline * config.replicate * config.shard * config.context * config.tensor,
        },
    }
