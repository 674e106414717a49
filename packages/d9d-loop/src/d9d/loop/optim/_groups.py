"""Which parameters decay."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def decay_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups in which matrices decay, and gains and biases (fewer than two dimensions) do not.

    Parameters that need no gradient are left out; so is a group without parameters.

    Args:
        named_parameters: As from `torch.nn.Module.named_parameters`.
        weight_decay: Of the group that decays.
    """
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [named for named in trained if named[1].ndim >= 2], "weight_decay": weight_decay},
        {"params": [named for named in trained if named[1].ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
