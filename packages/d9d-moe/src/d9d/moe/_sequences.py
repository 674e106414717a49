"""Which tokens belong to one sequence.

Shapes: T tokens, D sequences, E experts.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ._autocast import without_autocast


class Sequences(NamedTuple):
    """The sequences of T tokens. Balance losses are per sequence, and a packed document is one."""

    number: int
    """How many; known on the host, so that nothing waits for the device. Some may have no token here."""

    ids_T: Tensor | None = None
    """int64, in [0, number): the sequence of each token. None is sequences of equal length, one after the other."""

    @classmethod
    def from_offsets(cls, offsets: Tensor, tokens: int) -> Self:
        """Sequences one after the other.

        Args:
            offsets: Integers (D + 1), rising from 0 to ``tokens``: where each begins, as ``cu_seqlens`` of attention
                kernels. Repeated entries are empty sequences.
            tokens: T.
        """
        place_T = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
        return cls(offsets.shape[0] - 1, torch.searchsorted(offsets[1:].contiguous(), place_T, right=True))

    def sum(self, values_TE: Tensor) -> Tensor:
        """Add what belongs to one sequence: (D, E), differentiable, without atomics.

        Raises:
            ValueError: These are not the sequences of T tokens.
        """
        tokens, experts = values_TE.shape
        if self.ids_T is None:
            if tokens % self.number:
                raise ValueError(f"{tokens!r} tokens are no {self.number!r} sequences of equal length; give their ids")
            return values_TE.view(self.number, tokens // self.number, experts).sum(1)
        if self.ids_T.shape[0] != tokens:
            raise ValueError(f"the sequences are of {self.ids_T.shape[0]!r} tokens, and there are {tokens!r}")
        every_D = torch.arange(self.number, device=values_TE.device)
        belongs_TD = (self.ids_T[:, None] == every_D).to(values_TE.dtype)
        with without_autocast(values_TE):
            return belongs_TD.t() @ values_TE
