"""Backends of the summed loss, and the choice of one."""

import abc
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from d9d.moe import BackendConfig, Registry

from ._options import LossOptions
from ._vocabulary import VocabularyShard

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class LinearCrossEntropy(Protocol):
    """The sum of the losses of all tokens, differentiable in hidden states, weight and bias."""

    def __call__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weights_N: Tensor | None,
        *,
        options: LossOptions,
        shard: VocabularyShard | None,
        max_logits_bytes: int,
    ) -> Tensor:
        """Return the 0-dim sum, fp32 or fp64.

        Token weights are fp32 or fp64 and need no gradient. The weight has the dtype of the hidden states, or fp32, and
        then it is to be rounded to theirs.
        """
        ...


@attrs.frozen(kw_only=True)
class LinearCrossEntropyNeed:
    """What is asked of a backend; None is not known yet and not checked."""

    device_type: str | None = None
    """Where it runs."""

    dtype: torch.dtype | None = None
    """Dtype of hidden states, and of the weight in products."""

    features: frozenset[str] = frozenset()
    """What is asked for of: bias, label_smoothing, z_loss, soft_cap, token_weights, vocabulary_shard."""


FEATURES = frozenset({"bias", "label_smoothing", "z_loss", "soft_cap", "token_weights", "vocabulary_shard"})


@attrs.frozen(kw_only=True)
class LossCapabilities:
    """One row of the capability table; None means any."""

    device_types: frozenset[str] | None = None
    """Where it runs."""

    dtypes: frozenset[torch.dtype] | None = None
    """Dtypes it takes."""

    features: frozenset[str] = FEATURES
    """What it can."""


def _constant(function: FunctionT) -> FunctionT:
    """Do as `torch.compiler.assume_constant_result`, without importing the whole compiler."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 - to type checkers functions have no such attribute
    return function


class LinearCrossEntropyConfig(BackendConfig[LinearCrossEntropyNeed]):
    """Base of the backends' settings; register a subclass with ``linear_cross_entropy_backends.register``."""

    capabilities: ClassVar[LossCapabilities]
    """Its row of the capability table."""

    @abc.abstractmethod
    def build(self) -> LinearCrossEntropy:
        """Make the backend."""

    # Choosing is not for torch.compile to follow; what it does not follow may return a number, but no backend. It takes
    # plain values as arguments, and a configuration only as the one whose method this is.
    @_constant
    def index_if_fit(self, identity: int, device_type: str, dtype: torch.dtype, features: tuple[str, ...]) -> int:
        """The index in `built` of what this builds; ``identity`` is its id, which torch.compile then guards.

        Raises:
            ValueError: It cannot do what is asked of it.
        """
        assert identity == id(self)
        return _index(self, device_type, dtype, features)

    def refusal(self, need: LinearCrossEntropyNeed) -> str | None:
        """Say what of the need the capability table does not cover."""
        can = self.capabilities
        if can.device_types is not None and need.device_type is not None and need.device_type not in can.device_types:
            return f"runs on {sorted(can.device_types)} only, not on {need.device_type!r}; choose another backend"
        if can.dtypes is not None and need.dtype is not None and need.dtype not in can.dtypes:
            return f"takes {sorted(map(str, can.dtypes))} only, not {need.dtype!r}; choose another backend"
        if missing := sorted(need.features - can.features):
            return f"lacks {', '.join(missing)}; choose another backend"
        return None


linear_cross_entropy_backends: Registry[LinearCrossEntropyConfig, LinearCrossEntropyNeed] = Registry(
    "linear cross-entropy backend", env="D9D_LINEAR_CE_BACKEND"
)
"""Losses by kind; ``choose`` picks one."""


built: list[LinearCrossEntropy] = []
"""Backends in use."""


@_constant
def index_of(kind: str | None, device_type: str, dtype: torch.dtype, features: tuple[str, ...]) -> int:
    """The index in `built` of the backend of a kind, or of the one that is chosen."""
    return _index(kind, device_type, dtype, features)


def _index(
    asked: LinearCrossEntropyConfig | str | None, device_type: str, dtype: torch.dtype, features: tuple[str, ...]
) -> int:
    need = LinearCrossEntropyNeed(device_type=device_type, dtype=dtype, features=frozenset(features))
    backend = linear_cross_entropy_backends.choose(asked, need).config.build()
    if backend not in built:
        built.append(backend)
    return built.index(backend)
