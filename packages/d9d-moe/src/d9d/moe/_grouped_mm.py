"""Grouped matrix product: rows sorted by expert, each times its expert's weight.

Shapes: N rows, K inner size, M outer size, E experts. Weights are laid out as nn.Linear's, with the expert in front.
"""

import abc
from typing import ClassVar, Protocol

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from ._registry import BackendConfig, Registry


class GroupedMM(Protocol):
    """The product."""

    def __call__(self, x_NK: Tensor, weight_EMK: Tensor, counts_E: Tensor) -> Tensor:
        """Return (N, M): the first counts_E[0] rows times weight_EMK[0] transposed, and so on.

        ``counts_E`` is int32 on the device of x and sums to N. An expert without rows gets a zero gradient.
        """
        ...


@attrs.frozen(kw_only=True)
class GroupedMMNeed:
    """What is asked of a grouped product; None is not known yet and not checked."""

    device_type: str | None = None
    """Where it runs."""

    dtype: torch.dtype | None = None
    """Dtype of rows and weights."""

    sizes: tuple[int, ...] = ()
    """All inner and outer sizes."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """One row of the capability table; None means any."""

    device_types: frozenset[str] | None = None
    """Where it runs."""

    dtypes: frozenset[torch.dtype] | None = None
    """Dtypes it takes."""

    row_alignment: int = 1
    """Bytes of which a row of each operand must be a multiple."""


class GroupedMMConfig(BackendConfig[GroupedMMNeed]):
    """Base of the backends' settings; register a subclass with ``grouped_mm_backends.register``."""

    capabilities: ClassVar[Capabilities]
    """Its row of the capability table."""

    @abc.abstractmethod
    def build(self) -> GroupedMM:
        """Make the backend."""

    def refusal(self, need: GroupedMMNeed) -> str | None:
        """Say what of the need the capability table does not cover."""
        can = self.capabilities
        if can.device_types is not None and need.device_type is not None and need.device_type not in can.device_types:
            return f"runs on {sorted(can.device_types)} only, not on {need.device_type!r}; choose another backend"
        if need.dtype is not None:
            if can.dtypes is not None and need.dtype not in can.dtypes:
                return f"takes {sorted(map(str, can.dtypes))} only, not {need.dtype!r}; choose another backend"
            for size in need.sizes:
                if size * need.dtype.itemsize % can.row_alignment:
                    return (
                        f"needs rows of a multiple of {can.row_alignment} bytes, not of {size!r} × {need.dtype!r}; "
                        "change the size or choose another backend"
                    )
        return None


grouped_mm_backends: Registry[GroupedMMConfig, GroupedMMNeed] = Registry(
    "grouped_mm backend", env="D9D_GROUPED_MM_BACKEND"
)
"""Grouped products by kind; ``choose`` picks one."""


def eager_grouped_mm(x_NK: Tensor, weight_EMK: Tensor, counts_E: Tensor) -> Tensor:
    """Loop over the experts; see GroupedMM. Waits for the device to read the counts."""
    groups = torch.split(x_NK, counts_E.tolist())
    return torch.cat([F.linear(rows, weight) for rows, weight in zip(groups, weight_EMK.unbind(0))])


def torch_grouped_mm(x_NK: Tensor, weight_EMK: Tensor, counts_E: Tensor) -> Tensor:
    """Call torch's kernel; see GroupedMM. Counts stay on the device and need no alignment."""
    if x_NK.shape[0] == 0:  # any expert's product is this empty one, with zero gradients
        return F.linear(x_NK, weight_EMK[0])
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    weight_EKM = weight_EMK.transpose(1, 2)
    y_NM = F.grouped_mm(_row_major(x_NK), weight_EKM, offs=ends_E)
    # The kernel refuses expanded gradients, as that of a plain sum. torch 2.11 compiles no hook for any row count.
    if y_NM.requires_grad and not torch.compiler.is_compiling():
        y_NM.register_hook(_row_major)
    if weight_EKM.requires_grad and _spoils_empty_groups(x_NK.device):
        is_empty_E11 = (counts_E == 0)[:, None, None]
        weight_EKM.register_hook(lambda grad: grad.masked_fill(is_empty_E11, 0.0))
    return y_NM


def _row_major(x: Tensor) -> Tensor:
    """Give a matrix the strides of its shape. A single row of any strides is contiguous to torch, not to the kernel."""
    if not torch.compiler.is_compiling() and x.stride() == (x.shape[1], 1):  # a graph cannot ask a gradient
        return x
    return x.contiguous().view(-1).view(x.shape)


def _spoils_empty_groups(device: torch.device) -> bool:
    """Whether the gradient of a weight without rows is not zero: on Blackwell (pytorch#172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


@attrs.frozen(kw_only=True)
class EagerGroupedMMConfig(GroupedMMConfig):
    """The reference: a loop over the experts, for any device and dtype."""

    kind: ClassVar[str] = "eager"
    priority: ClassVar[int | None] = 0
    capabilities: ClassVar[Capabilities] = Capabilities()

    def build(self) -> GroupedMM:
        """Make the backend."""
        return eager_grouped_mm


grouped_mm_backends.register(EagerGroupedMMConfig)


@attrs.frozen(kw_only=True)
class TorchGroupedMMConfig(GroupedMMConfig):
    """torch.nn.functional.grouped_mm."""

    kind: ClassVar[str] = "torch"
    priority: ClassVar[int | None] = 10
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_types=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16}), row_alignment=16
    )

    def build(self) -> GroupedMM:
        """Make the backend."""
        return torch_grouped_mm


grouped_mm_backends.register(TorchGroupedMMConfig)
