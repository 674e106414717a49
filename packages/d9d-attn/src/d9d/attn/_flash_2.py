"""Attention by the package flash-attn (Dao, 2023, arXiv:2307.08691).

Shapes as in AttentionBackend; N the B·S positions of the batch one after the other, P the padded head dim.

Its operators are called one level below its public functions, whose gradient forgets the log-sum-exp. One level below,
the backward pass takes result and log-sum-exp as given: ``dS = P ∘ (dP − rowsum(dO ∘ O))`` with ``P = exp(S − lse)``.
Given those with the sinks in, it gives the gradients with the sinks in.
"""

import importlib
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import attrs
import torch
from torch import Tensor

from ._backend import HALF_PRECISION, AttentionBackend, AttentionBackendConfig, Capabilities, attention_backends
from ._eager import EagerAttention
from ._feature import Feature
from ._head_dims import next_multiple, pad_head_dim
from ._mask import AttentionMask, require_mask
from ._second_derivative import refuse_second_derivative
from ._sinks import add_sinks
from ._varlen import Sequences, sequences_of, window_bounds

_OPERATORS = "flash_attn.flash_attn_interface"


@attrs.frozen(kw_only=True)
class FlashAttention2Config(AttentionBackendConfig):
    """FlashAttention 2, from the package flash-attn 2.8 or newer."""

    kind: ClassVar[str] = "flash_attention_2"
    priority: ClassVar[int | None] = None  # until its values have been compared on a GPU
    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(Feature)
        - {Feature.BOOLEAN_BIAS, Feature.ADDITIVE_BIAS, Feature.BIAS_GRADIENT, Feature.LSE_GRADIENT},
        device_types=frozenset({"cuda"}),
        cuda_capability=(8, 0),
        dtypes=HALF_PRECISION,
        max_head_dim=256,
        requires=_OPERATORS,
        distribution="flash-attn>=2.8",
        install="d9d-attn[flash-attn]",
    )

    deterministic: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether gradients are the same in each run, as under torch.use_deterministic_algorithms; costs time, memory."""

    def build(self) -> AttentionBackend:
        """Make the backend.

        Raises:
            ImportError: The package is not installed.
        """
        try:
            operators = importlib.import_module(_OPERATORS)
        except ImportError as error:
            raise ImportError(f"{self.kind!r} needs {_OPERATORS!r}; install {self.capabilities.install!r}") from error
        return FlashAttention2(self, operators)


attention_backends.register(FlashAttention2Config)


class _Options(NamedTuple):
    """What both passes are told; a tuple, because torch.compile follows the making of one."""

    sequences: Sequences
    scale: float
    causal: bool
    window: tuple[int, int]
    soft_cap: float
    dropout: float
    deterministic: bool
    operators: ModuleType

    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        sequences = self.sequences
        return sequences.cu_queries, sequences.cu_keys, sequences.max_queries, sequences.max_keys

    def settings(self) -> dict[str, Any]:
        return {
            "dropout_p": self.dropout,
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size_left": self.window[0],
            "window_size_right": self.window[1],
            "softcap": self.soft_cap,
            "alibi_slopes": None,
        }


class _Attend(torch.autograd.Function):
    """(q_NHP, k_NGP, v_NGP, sinks_H) → (out_NHP, lse_HN), the sinks in both."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, q_NHP: Tensor, k_NGP: Tensor, v_NGP: Tensor, sinks_H: Tensor | None, options: _Options
    ) -> tuple[Tensor, Tensor]:
        out_NHP, lse_HN, _, rng_state = options.operators._flash_attn_varlen_forward(  # noqa: SLF001 - see above
            q_NHP, k_NGP, v_NGP, *options.lengths(), **options.settings(), return_softmax=False
        )
        # Where there is no key it says +inf, so that exp(S − lse) is zero; we say −inf, and sinks need it.
        lse_HN = lse_HN.masked_fill(lse_HN == torch.inf, -torch.inf)
        if sinks_H is not None:
            out_1NHP, lse_1HN = add_sinks(out_NHP[None], lse_HN[None], sinks_H)
            out_NHP, lse_HN = out_1NHP[0], lse_1HN[0]
        ctx.save_for_backward(q_NHP, k_NGP, v_NGP, sinks_H, out_NHP, lse_HN, rng_state)
        ctx.options = options
        ctx.mark_non_differentiable(lse_HN)
        return out_NHP, lse_HN

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        d_out_NHP = gradients[0]
        q_NHP, k_NGP, v_NGP, sinks_H, out_NHP, lse_HN, rng_state = ctx.saved_tensors
        options: _Options = ctx.options
        dq, dk, dv = torch.empty_like(q_NHP), torch.empty_like(k_NGP), torch.empty_like(v_NGP)
        options.operators._flash_attn_varlen_backward(  # noqa: SLF001 - see above
            d_out_NHP,
            q_NHP,
            k_NGP,
            v_NGP,
            out_NHP,
            lse_HN.masked_fill(lse_HN == -torch.inf, torch.inf),
            dq,
            dk,
            dv,
            *options.lengths(),
            **options.settings(),
            deterministic=options.deterministic,
            rng_state=rng_state,
        )
        d_sinks_H = None
        if sinks_H is not None:
            wide = torch.promote_types(out_NHP.dtype, torch.float32)
            delta_NH = (d_out_NHP.to(wide) * out_NHP.to(wide)).sum(-1)
            of_position_NH = (sinks_H.to(wide)[:, None] - lse_HN).exp().t() * delta_NH
            if (real_BS := options.sequences.real_BS) is not None:
                of_position_NH = of_position_NH.masked_fill(~real_BS.flatten()[:, None], 0.0)
            d_sinks_H = -of_position_NH.sum(0).to(sinks_H.dtype)
        return dq, dk, dv, d_sinks_H, None


class _WithoutGradient(torch.autograd.Function):
    """The log-sum-exp, which would otherwise be taken for a constant."""

    @staticmethod
    def forward(_ctx: Any, lse_BHS: Tensor, *_sources: Tensor | None) -> Tensor:
        return lse_BHS.view_as(lse_BHS)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[None, ...]:  # noqa: ARG004 - its name is autograd's
        raise RuntimeError(
            "a gradient reached the log-sum-exp of 'flash_attention_2', which has none; detach it, or use a backend "
            "with LSE_GRADIENT in its row of the capability table"
        )


@attrs.frozen
class FlashAttention2:
    """The backend; see FlashAttention2Config."""

    config: FlashAttention2Config
    """Its settings."""

    operators: ModuleType
    """The package's module of operators."""

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
        """Attend; see AttentionBackend.

        Raises:
            ValueError: The mask has a bias.
        """
        return self._attend(
            q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, sinks_H=sinks_H, soft_cap=soft_cap, dropout=dropout
        )[0]

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
        """Attend, and give the log-sum-exp, which has no gradient; see AttentionBackend.

        Raises:
            ValueError: The mask has a bias.
        """
        out_BSHE, lse_BHS = self._attend(
            q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, sinks_H=sinks_H, soft_cap=soft_cap, dropout=dropout
        )
        return out_BSHE, _WithoutGradient.apply(lse_BHS, q_BSHD, k_BTGD, v_BTGE, sinks_H)

    def _attend(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        sinks_H: Tensor | None,
        soft_cap: float | None,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        require_mask(mask)
        if mask.bias is not None:
            raise ValueError("the attention backend 'flash_attention_2' has no bias; use 'torch', 'flex' or 'eager'")
        batch, queries = q_BSHD.shape[:2]
        if 0 in (batch, queries, k_BTGD.shape[1]):  # which its kernels refuse
            return EagerAttention().with_lse(q_BSHD, k_BTGD, v_BTGE, mask, scale=scale, sinks_H=sinks_H)
        sequences = sequences_of(mask, batch=batch, queries=queries, keys=k_BTGD.shape[1], device=q_BSHD.device)
        before, after = window_bounds(mask)
        options = _Options(
            sequences=sequences,
            scale=scale,
            causal=mask.causal,
            window=(-1 if before is None else before, -1 if after is None else after),
            soft_cap=soft_cap or 0.0,
            dropout=dropout,
            deterministic=self.config.deterministic or torch.are_deterministic_algorithms_enabled(),
            operators=self.operators,
        )
        value_dim = v_BTGE.shape[-1]
        padded_dim = next_multiple(max(q_BSHD.shape[-1], value_dim), 8)
        q, k, v = (sequences.flatten(pad_head_dim(x, padded_dim)) for x in (q_BSHD, k_BTGD, v_BTGE))
        out_NHP, lse_HN = _Attend.apply(q, k, v, sinks_H, options)
        out_BSHP = sequences.unflatten(out_NHP, (batch, queries))
        lse_BHS = lse_HN.unflatten(1, (batch, queries)).transpose(0, 1)
        detached = None if sinks_H is None else sinks_H.detach()
        return out_BSHP[..., :value_dim], sequences.fill_padding_lse(lse_BHS, detached)
