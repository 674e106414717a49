"""Head dims that kernels do not take, padded with zeros: these change no score and no other element of the result."""

import torch.nn.functional as F
from torch import Tensor


def pad_head_dim(x: Tensor, head_dim: int) -> Tensor:
    """Append zeros until the last dim is ``head_dim``."""
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


def next_multiple(size: int, of: int) -> int:
    """The smallest multiple of ``of`` that is not below ``size``."""
    return -(-size // of) * of
