"""A keyed permutation of each epoch, computed one position at a time.

Nothing is stored or drawn: a Feistel network over the next power of four, walked until it falls inside the epoch, is a
permutation of any length in constant memory (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from hashlib import blake2b

import attrs

_ROUNDS = 8


@attrs.frozen(kw_only=True)
class SampleOrder:
    """The endless sequence of sample indices of a run: epoch after epoch, each a permutation of the data set.

    Epochs follow each other without a gap, so a global batch that crosses the end of an epoch takes its rest from the
    next one: no sample is dropped and every batch is full. The order is the same on every platform and in every
    version of Python and torch.

    Raises:
        ValueError: If the data set is empty.
    """

    length: int
    """Samples of the data set."""

    seed: int
    """Another seed, another order."""

    def __attrs_post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"the data set has length={self.length!r}; training needs at least one sample")

    def __getitem__(self, position: int) -> int:
        """The sample at a position of the whole run, counted from 0 over all epochs."""
        epoch, index = divmod(position, self.length)
        bits = max(1, ((self.length - 1).bit_length() + 1) // 2)
        while True:
            index = self._permute(index, epoch, bits)
            if index < self.length:
                return index

    def _permute(self, index: int, epoch: int, bits: int) -> int:
        """A permutation of range(4**bits)."""
        left, right = index >> bits, index & ((1 << bits) - 1)
        for turn in range(_ROUNDS):
            digest = blake2b(f"{self.seed}/{epoch}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & ((1 << bits) - 1))
        return (left << bits) | right
