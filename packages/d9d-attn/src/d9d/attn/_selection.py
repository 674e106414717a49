"""The backend of a layer, chosen by what it meets and remembered, under torch.compile too."""

import attrs
import torch
from torch import Tensor

from ._backend import AttentionBackend, AttentionBackendConfig, AttentionNeed, attention_backends
from ._constant import constant
from ._feature import Feature
from ._mask import AttentionMask

_built: list[AttentionBackend] = []


@attrs.frozen(eq=False)
class BackendSelector:
    """Chooses once per device type, dtype and kind of mask.

    Raises:
        ValueError: The backend asked for is unknown, not installed, or cannot do what the layer needs.
    """

    asked: AttentionBackendConfig | str | None
    """Backend or its kind; None leaves it to D9D_ATTN_BACKEND, else to the automatic choice."""

    need: AttentionNeed
    """What the layer needs whatever it meets."""

    _indices: dict[tuple[str, torch.dtype, tuple[Feature, ...]], int] = attrs.field(
        factory=dict, init=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        attention_backends.choose(self.asked, self.need)

    def __reduce__(self) -> tuple[type["BackendSelector"], tuple[object, ...]]:
        """What was chosen is of this process, and of its environment: a copy chooses anew."""
        return BackendSelector, (self.asked, self.need)

    def backend(self, q: Tensor, mask: AttentionMask) -> AttentionBackend:
        """The backend for queries such as these.

        Raises:
            ValueError: What was asked for cannot do what is needed, or nothing can.
        """
        return _built[self._index(id(self), q.device.type, q.dtype, mask.features)]

    # Choosing is not for torch.compile to follow; what it does not follow may return a number, but no backend. The
    # identity makes it guard which selector this is.
    @constant
    def _index(self, identity: int, device_type: str, dtype: torch.dtype, features: tuple[Feature, ...]) -> int:
        assert identity == id(self)
        key = (device_type, dtype, features)
        if key not in self._indices:
            need = attrs.evolve(
                self.need, device_type=device_type, dtype=dtype, features=self.need.features.union(features)
            )
            backend = attention_backends.choose(self.asked, need).config.build()
            if backend not in _built:
                _built.append(backend)
            self._indices[key] = _built.index(backend)
        return self._indices[key]
