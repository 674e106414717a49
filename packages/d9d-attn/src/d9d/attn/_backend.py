"""What an attention backend is, and how one is chosen."""

import abc
import enum
import importlib.util
import sys
from typing import ClassVar, Protocol

import attrs
import torch
from torch import Tensor

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
    ) -> Tensor:
        """Attend with scores ``scale · q·k``; a query that sees no key gets zeros.

        ``sinks_H`` holds per query head the score of one more key whose value is zero.
        """
        ...


class Feature(enum.StrEnum):
    """What a backend may or may not be able to do."""

    GROUPED_QUERY = "fewer key heads than query heads"
    VALUE_DIM = "values of another head dim than keys"
    WINDOW = "sliding windows"
    DOCUMENTS = "packed documents"
    BIAS = "bias"
    SINKS = "sinks"


@attrs.frozen(kw_only=True)
class AttentionNeed:
    """What an attention layer asks of its backend; None is unknown when the layer is built and is not checked."""

    features: frozenset[Feature] = frozenset()
    """Features that the layer uses."""

    device_type: str | None = None
    """Where it will run."""

    dtype: torch.dtype | None = None
    """Dtype of q, k and v."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """One row of the capability table; None means any."""

    features: frozenset[Feature]
    """Features it has."""

    device_types: frozenset[str] | None = None
    """Where it runs."""

    dtypes: frozenset[torch.dtype] | None = None
    """Dtypes of q, k and v it takes."""

    requires: str | None = None
    """Top-level import name of the package it needs besides torch."""

    install: str | None = None
    """What to install for it."""


class AttentionBackendConfig(BackendConfig[AttentionNeed]):
    """Base of the backends' settings; register a subclass with ``attention_backends.register``."""

    capabilities: ClassVar[Capabilities]
    """Its row of the capability table."""

    @abc.abstractmethod
    def build(self) -> AttentionBackend:
        """Make the backend."""

    def refusal(self, need: AttentionNeed) -> str | None:
        """Say what of the need the capability table does not cover."""
        can = self.capabilities
        if can.requires is not None and not _is_installed(can.requires):
            return f"needs {can.requires!r}, which is not installed; install {can.install or can.requires!r}"
        if missing := sorted(need.features - can.features):
            return f"has no {', '.join(missing)}; choose another backend or leave the choice automatic"
        if can.device_types is not None and need.device_type is not None and need.device_type not in can.device_types:
            return f"runs on {sorted(can.device_types)} only, not on {need.device_type!r}; choose another backend"
        if can.dtypes is not None and need.dtype is not None and need.dtype not in can.dtypes:
            return f"takes {sorted(map(str, can.dtypes))} only, not {need.dtype!r}; choose another backend"
        return None


def _is_installed(module: str) -> bool:
    # Looking up a submodule would import its parents, and raise without them; looking up a loaded module may raise too.
    package = module.partition(".")[0]
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


attention_backends: Registry[AttentionBackendConfig, AttentionNeed] = Registry(
    "attention backend", env="D9D_ATTN_BACKEND"
)
"""Attention backends by kind; ``choose`` picks one."""
