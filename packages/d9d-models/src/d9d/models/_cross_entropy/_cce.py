"""The package cut-cross-entropy as a backend (Wijmans et al. 2024, arXiv:2411.09009)."""

import importlib
import importlib.util
import inspect
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from ._backend import (
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    LinearCrossEntropyNeed,
    LossCapabilities,
    linear_cross_entropy_backends,
)
from ._options import LossOptions
from ._vocabulary import VocabularyShard


@attrs.frozen(kw_only=True)
class CutLinearCrossEntropyConfig(LinearCrossEntropyConfig):
    """cut-cross-entropy, with nothing left out of the gradients unless asked for."""

    filters: bool = False
    """Whether gradients too small for bf16 to add are left out: faster, and biased."""

    kind: ClassVar[str] = "cce"
    priority: ClassVar[int | None] = None
    capabilities: ClassVar[LossCapabilities] = LossCapabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        features=frozenset({"soft_cap", "token_weights"}),
    )

    def build(self) -> LinearCrossEntropy:
        """Make the backend.

        Raises:
            ImportError: The package is not installed.
        """
        if not _is_installed():
            raise ImportError('the backend "cce" needs a package: install d9d-models[cce]')
        return _CutCrossEntropy(filters=self.filters)

    def refusal(self, need: LinearCrossEntropyNeed) -> str | None:
        """Say what is missing."""
        if not _is_installed():
            return "needs a package that is not installed: install d9d-models[cce], or choose another backend"
        return super().refusal(need)


def _is_installed() -> bool:
    return importlib.util.find_spec("cut_cross_entropy") is not None


@attrs.frozen
class _CutCrossEntropy:
    filters: bool

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
        """See `LinearCrossEntropy`; logits never leave the chip."""
        del bias_V, shard, max_logits_bytes
        compute: Any = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        settings: dict[str, Any] = {} if self.filters else {"filter_eps": None}
        if "accum_c_fp32" in inspect.signature(compute).parameters:  # from 25.3 on
            settings |= {"accum_e_fp32": not self.filters, "accum_c_fp32": not self.filters}
        losses_N: Tensor = compute(
            hidden_NH,
            weight_VH.to(hidden_NH.dtype),
            labels_N,
            ignore_index=options.ignore_index,
            softcap=options.soft_cap,
            reduction="none",
            **settings,
        )
        return (losses_N.float() if weights_N is None else losses_N.float() * weights_N).sum()


linear_cross_entropy_backends.register(CutLinearCrossEntropyConfig)
