"""What a ratio or an error looks like: the guess that an experienced reader would make."""

import math
from collections.abc import Mapping

from d9d.mesh import MeshConfig

from ._comparison import ALL_SHARES, Quantity
from ._layout_result import Failure, world_size

_ALIKE = 1e-3


def hint(failure: Failure, mesh: MeshConfig) -> str | None:
    """A guess at the cause of a failure, in a few words."""
    match failure.worst.quantity:
        case Quantity.INITIAL:
            return "weights depend on the rank or the layout: draw them from one seed, or load them"
        case Quantity.TIE:
            return "no longer one parameter: lay out the modules that share it in one call, or tie them again"
        case Quantity.SHARE if failure.worst.name == ALL_SHARES:
            return "the parts that split gives do not add up to the batch, or the loss is no sum over samples"
        case Quantity.SHARE:
            return "its loop computed the loss of something else than its part of the batch"
        case Quantity.REPLICA:
            return "ranks hold different bits and will drift apart"
        case _:
            return _disagreement(failure) or _factor(failure, mesh) or _rounding(failure)


def _disagreement(failure: Failure) -> str | None:
    low, high = min(failure.ratios), max(failure.ratios)
    if not high - low > _ALIKE:
        return None
    return f"ranks disagree, with ratios from {low:.4f} to {high:.4f}: not summed over ranks?"


def _factor(failure: Failure, mesh: MeshConfig) -> str | None:
    ratio = failure.worst.ratio
    # Only if the value is that multiple, and not just as long.
    if not abs(failure.worst.error - abs(ratio - 1)) < _ALIKE:
        return None
    if abs(ratio) < _ALIKE:
        return "nothing arrived"
    sizes = _sizes(mesh, failure.worst.microbatches)
    is_norm = failure.worst.quantity is Quantity.NORM
    for text, factor, meaning in (
        ("{}", ratio, "summed once too often, or not divided, over"),
        ("1/{}", 1 / ratio, "averaged, or not summed, over"),
        ("√{}", ratio**2 if is_norm else 0.0, "counted once for each of"),
        ("1/√{}", 1 / ratio**2 if is_norm else 0.0, "not summed over"),
    ):
        number = round(factor) if math.isfinite(factor) else 0
        if number > 1 and abs(factor / number - 1) < _ALIKE and (dims := _dims_of_size(sizes, number)):
            return f"{text.format(number)}: {meaning} {dims}?"
    return None


def _rounding(failure: Failure) -> str | None:
    worst = failure.worst
    if not abs(worst.ratio - 1) < 0.02 or worst.error > 0.05:
        return None
    dtype = "float32" if worst.error < 1e-5 else "bfloat16"
    return f"about the rounding of {dtype}: is anything computed, summed or stored in it?"


def _dims_of_size(sizes: Mapping[str, int], number: int) -> str:
    return " or ".join(f"the {number} {what}" for what, size in sizes.items() if size == number)


def _sizes(mesh: MeshConfig, microbatches: int) -> dict[str, int]:
    ep_replicate, ep_shard, ep = mesh.fold_experts()
    return {
        "data ranks": mesh.replicate * mesh.shard,
        "microbatches": microbatches,
        "ranks of dp_replicate": mesh.replicate,
        "ranks of dp_cp_shard": mesh.shard * mesh.context,
        "ranks of ep_replicate": ep_replicate if ep > 1 else 1,
        "ranks of ep_shard": ep_shard if ep > 1 else 1,
        "ranks of ep": ep,
        "ranks of cp": mesh.context,
        "ranks of tp": mesh.tensor,
        "ranks of pp": mesh.pipeline,
        "ranks": world_size(mesh),
    }
