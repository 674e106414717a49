"""What the loss of a token is."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)  # torch.compile does not understand how attrs freezes
class LossOptions:
    """The loss of a token, of its logits z and its label y, over a vocabulary of V.

    ``logsumexp(z) − (1 − label_smoothing)·z[y] − label_smoothing/V·Σz + z_loss·logsumexp(z)²``

    Raises:
        ValueError: A number is out of its range.
    """

    ignore_index: int = -100
    """Tokens with this label have no loss and no gradient."""

    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary (Szegedy et al. 2016, section 7)."""

    z_loss: float = 0.0
    """Factor of the squared log-partition, which keeps logits near 0 (PaLM, Chowdhery et al. 2022, section 5)."""

    soft_cap: float | None = None
    """Logits are ``soft_cap · tanh(logit / soft_cap)``, as in Gemma 2; none: as they are."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing!r} must be at least 0 and less than 1")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss!r} must not be negative, and finite")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(f"soft_cap={self.soft_cap!r} must be greater than 0 and finite, or None")
