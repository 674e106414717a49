"""What an attention backend is, and what can be asked of one."""

import abc
from collections.abc import Iterator
from typing import ClassVar, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from ._feature import Feature
from ._installed import is_installed, is_recent
from ._mask import AttentionMask
from ._registry import BackendConfig, Registry


class AttentionBackend(Protocol):
    """Softmax attention.

    Shapes: B batch, S queries, T keys, H query heads, G key heads (H a multiple of G; query heads h·H/G to
    (h+1)·H/G − 1 use key head h), D query-key head dim, E value head dim. The result is (B, S, H, E) in the dtype of q.
    """

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
        soft_cap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend with scores ``scale · q·k``; a query that sees no key gets zeros.

        ``soft_cap`` c makes a score x into ``c·tanh(x/c)``, before a bias is added. ``sinks_H`` holds per query head
        the score of one more key whose value is zero. ``dropout`` is the probability by which a weight is dropped,
        the others being divided by what is left.
        """
        ...


@runtime_checkable
class AttentionBackendWithLSE(AttentionBackend, Protocol):
    """A backend whose row of the capability table says `Feature.LSE`."""

    def with_lse(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
        soft_cap: float | None = None,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Attend, and give the logarithm of the sum of the exponentials of each query's scores.

        It is (B, H, S) in fp32 (fp64 for fp64 inputs) and counts the sink; −inf where there is no key and no sink.
        """
        ...


@attrs.frozen(kw_only=True)
class AttentionNeed:
    """What an attention layer asks of its backend; None is unknown when the layer is built and is not checked."""

    features: frozenset[Feature] = frozenset()
    """Features that the layer uses."""

    device_type: str | None = None
    """Where it will run."""

    dtype: torch.dtype | None = None
    """Dtype of q, k and v."""

    head_dim: int | None = None
    """The larger of the head dims of keys and values."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """One row of the capability table; None means any."""

    features: frozenset[Feature]
    """Features it has."""

    device_types: frozenset[str] | None = None
    """Where it runs."""

    cuda_capability: tuple[int, int] | None = None
    """The oldest CUDA device it runs on, as its compute capability."""

    dtypes: frozenset[torch.dtype] | None = None
    """Dtypes of q, k and v it takes."""

    max_head_dim: int | None = None
    """The largest head dim it takes; smaller ones are padded as its kernels need."""

    requires: str | None = None
    """Import name of the module it needs besides torch."""

    distribution: str | None = None
    """The package that brings the module, as ``name>=version``; others may bring one of the same name."""

    install: str | None = None
    """What to install for it."""


HALF_PRECISION = frozenset({torch.float16, torch.bfloat16})


class AttentionBackendConfig(BackendConfig[AttentionNeed]):
    """Base of the backends' settings; register a subclass with ``attention_backends.register``."""

    capabilities: ClassVar[Capabilities]
    """Its row of the capability table."""

    @abc.abstractmethod
    def build(self) -> AttentionBackend:
        """Make the backend."""

    def refusal(self, need: AttentionNeed) -> str | None:
        """Say what of the need the capability table does not cover."""
        return next(self._refusals(need), None)

    def _refusals(self, need: AttentionNeed) -> Iterator[str]:
        can = self.capabilities
        if can.requires is not None and not is_installed(can.requires):
            yield f"needs {can.requires!r}, which is not installed; install {can.install or can.requires!r}"
        if can.distribution is not None and not is_recent(can.distribution):
            yield f"needs {can.distribution!r}, which is not installed; install {can.install or can.distribution!r}"
        if missing := sorted(need.features - can.features):
            yield f"has no {', '.join(missing)}; choose another backend or leave the choice automatic"
        if can.device_types is not None and need.device_type is not None and need.device_type not in can.device_types:
            yield f"runs on {sorted(can.device_types)} only, not on {need.device_type!r}; choose another backend"
        if can.dtypes is not None and need.dtype is not None and need.dtype not in can.dtypes:
            yield f"takes {sorted(map(str, can.dtypes))} only, not {need.dtype!r}; choose another backend"
        if can.max_head_dim is not None and need.head_dim is not None and need.head_dim > can.max_head_dim:
            yield f"takes head dims up to {can.max_head_dim} only, not {need.head_dim!r}; choose another backend"
        if can.cuda_capability is not None and need.device_type == "cuda":
            if not torch.cuda.is_available():
                yield "needs a CUDA device, found none; choose another backend"
            elif (found := torch.cuda.get_device_capability()) < can.cuda_capability:
                yield f"needs compute capability {can.cuda_capability}, found {found}; choose another backend"


attention_backends: Registry[AttentionBackendConfig, AttentionNeed] = Registry(
    "attention backend", env="D9D_ATTN_BACKEND"
)
"""Attention backends by kind; ``choose`` picks one."""
