"""The grouped product of a layer, chosen by what it meets and remembered, under torch.compile too."""

import attrs
import torch
from torch import Tensor

from ._constant import constant
from ._grouped_mm import GroupedMM, GroupedMMConfig, GroupedMMNeed, grouped_mm_backends

_built: list[GroupedMM] = []


@attrs.frozen(eq=False)
class ProductChoice:
    """Chooses once per device type and dtype.

    Raises:
        ValueError: What was asked for is unknown or cannot do what the layer needs.
    """

    asked: GroupedMMConfig | str | None
    """Grouped product or its kind; None leaves it to D9D_GROUPED_MM_BACKEND, else to the automatic choice."""

    need: GroupedMMNeed
    """What the layer needs whatever it meets."""

    _indices: dict[tuple[str, torch.dtype], int] = attrs.field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        grouped_mm_backends.choose(self.asked, self.need)

    def __reduce__(self) -> tuple[type["ProductChoice"], tuple[object, ...]]:
        """What was chosen is of this process, and of its environment: a copy chooses anew."""
        return ProductChoice, (self.asked, self.need)

    def product(self, x_NK: Tensor) -> GroupedMM:
        """The product for rows such as these.

        Raises:
            ValueError: What was asked for cannot do what is needed, or nothing can.
        """
        return _built[self._index(id(self), x_NK.device.type, x_NK.dtype)]

    # Choosing is not for torch.compile to follow; what it does not follow may return a number, but no product. The
    # identity makes it guard which choice this is.
    @constant
    def _index(self, identity: int, device_type: str, dtype: torch.dtype) -> int:
        assert identity == id(self)
        key = (device_type, dtype)
        if key not in self._indices:
            need = attrs.evolve(self.need, device_type=device_type, dtype=dtype)
            product = grouped_mm_backends.choose(self.asked, need).config.build()
            if product not in _built:
                _built.append(product)
            self._indices[key] = _built.index(product)
        return self._indices[key]
