"""An order-2 model of bytes: the baseline that training must beat."""

from collections.abc import Iterable

import torch
from torch import Tensor

_BYTES = 256


class Order2Model:
    """Probability of a byte after two others, from counts, smoothed by lower orders.

    ``p(c | a b) = (n(a b c) + k · p(c | b)) / (n(a b) + k)``, and in the same way down to the uniform distribution
    (MacKay and Peto, "A hierarchical Dirichlet language model", 1995).

    Args:
        files: The training text.
        concentration: k.
    """

    def __init__(self, files: Iterable[bytes], *, concentration: float = 10.0) -> None:
        counts = torch.bincount(torch.cat([_contexts(content) for content in files]), minlength=_BYTES**3)
        triples = counts.view(_BYTES, _BYTES, _BYTES)
        pairs = triples.sum(0)
        singles = pairs.sum(0)
        uniform = torch.full((_BYTES,), 1 / _BYTES)
        order0 = _smooth(singles, uniform, concentration)
        order1 = _smooth(pairs, order0, concentration)
        self._probabilities = _smooth(triples, order1, concentration)

    def bits_per_byte(self, files: Iterable[bytes]) -> float:
        """Mean of −log₂ p over all bytes that have two before them in their file."""
        indices = torch.cat([_contexts(content) for content in files])
        return -self._probabilities.flatten()[indices].log2().mean().item()


def _contexts(content: bytes) -> Tensor:
    """For each byte from the third on, its place in a table by the two before it and itself."""
    if len(content) < 3:
        return torch.zeros(0, dtype=torch.int64)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(torch.int64)
    return (text[:-2] * _BYTES + text[1:-1]) * _BYTES + text[2:]


def _smooth(counts: Tensor, prior: Tensor, concentration: float) -> Tensor:
    return (counts + concentration * prior) / (counts.sum(-1, keepdim=True) + concentration)
