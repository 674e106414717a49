"""Labels, and the tokens that count."""

import torch
from torch import Tensor


def check_labels(labels_N: Tensor, classes: int, ignore_index: int) -> Tensor:
    """Which labels are no class, for the caller to make their losses NaN.

    Raises:
        ValueError: There is one on the CPU. On a GPU the host would have to wait to know.
    """
    wrong_N = (labels_N != ignore_index) & ((labels_N < 0) | (labels_N >= classes))
    if labels_N.is_cpu and wrong_N.any():
        label = labels_N[wrong_N][0].item()
        raise ValueError(f"the label {label} is none of {classes} classes, nor ignored ({ignore_index})")
    return wrong_N


def counted(labels_N: Tensor, weights_N: Tensor | None, ignore_index: int) -> Tensor:
    """Whether the loss of a token counts."""
    kept_N = labels_N != ignore_index
    return kept_N if weights_N is None else kept_N & (weights_N != 0)


def without_uncounted(hidden_CH: Tensor, counted_C: Tensor) -> Tensor:
    """Zeros instead of hidden states that do not count: 0 times a NaN among them would be in the weight's gradient."""
    return torch.where(counted_C[:, None], hidden_CH, 0.0)
