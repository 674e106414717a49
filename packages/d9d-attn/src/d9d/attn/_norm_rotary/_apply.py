"""The public functions, and which way they go.

Shapes: B batch, S positions, H query heads, G key heads, D head dim, R rotary dim.
"""

import functools

import attrs
import torch
from torch import Tensor

from .._kernel_choice import fits, splits
from .._weight_branch import Gradients, branched
from ._operators import norm_and_rotate_backward_operator, norm_and_rotate_operator
from ._reference import norm_and_rotate_one

MAX_HEAD_DIM = 4096
"""A kernel holds whole heads; larger ones go the plain way."""


def norm_and_rotate(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalize each head of q and k where there is a weight (`RMSNorm` over D), then turn its first R dims.

    Computed in fp32 or wider and rounded once; each result has the dtype of its input. Differentiable in q, k and
    weights, not in the tables.

    Args:
        q_BSHD: Queries; like keys, a strided view such as a part of a fused projection is fine.
        k_BSGD: Keys.
        cos_BSR: From `RotaryEmbedding`, where B may be 1; entries i and i + R / 2 are the same, and only the first
            half is read.
        sin_BSR: Likewise.
        q_weight: (D,), of the norm of q; None leaves the norm out.
        k_weight: (D,), of the norm of k; None leaves the norm out.
        eps: Added to the mean square.
        zero_centered: Multiply by ``1 + weight``.
        interleaved: Pairs are dims 2 i and 2 i + 1, not i and i + R / 2.

    Raises:
        ValueError: Shapes do not go together.
    """
    _check(q_BSHD, k_BSGD, cos_BSR, sin_BSR)
    _check_weights(q_BSHD.shape[-1], q_weight, k_weight)
    cos, sin = cos_BSR.detach(), sin_BSR.detach()
    weights = (q_weight, k_weight)
    if not _has_kernel(q_BSHD, k_BSGD, cos, sin, weights):
        plain = functools.partial(norm_and_rotate_one, eps=eps, zero_centered=zero_centered, interleaved=interleaved)
        return plain(q_BSHD, cos, sin, q_weight), plain(k_BSGD, cos, sin, k_weight)
    operands = (q_BSHD, k_BSGD, cos, sin, *weights, eps, zero_centered, interleaved)
    if not splits((q_BSHD, k_BSGD), weights):
        q, k = norm_and_rotate_operator(*operands)
        return q, k
    with torch.no_grad():
        made = norm_and_rotate_operator(*operands)
    present = [x for x in weights if x is not None]
    q, k = branched(
        made,
        inputs=[q_BSHD, k_BSGD],
        weights=present,
        saved=[q_BSHD, k_BSGD, cos, sin, *present],
        backward=_Backward(q_weight is not None, k_weight is not None, eps, zero_centered, interleaved),
        read_by_weights=2,
    )
    return q, k


@attrs.frozen
class _Backward:
    """See `Backward`."""

    has_q_weight: bool
    has_k_weight: bool
    eps: float
    zero_centered: bool
    interleaved: bool

    def __call__(
        self, upstream: Gradients, saved: tuple[Tensor, ...], *, inputs: bool, weights: bool
    ) -> tuple[Gradients, Gradients]:
        q, k, cos, sin, *present = saved
        q_weight = present[0] if self.has_q_weight else None
        k_weight = present[-1] if self.has_k_weight else None
        dq_out, dk_out = (torch.zeros_like(x) if dy is None else dy for x, dy in zip((q, k), upstream))
        plain = (self.eps, self.zero_centered, self.interleaved, inputs, weights)
        made = norm_and_rotate_backward_operator(dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, *plain)
        has_weight = (self.has_q_weight, self.has_k_weight)
        return made[:2], tuple(gradient for gradient, has in zip(made[2:], has_weight) if has)


def apply_rotary(
    q_BSHD: Tensor, k_BSGD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn the first R dims of every head of q and k, pair by pair; see `norm_and_rotate`, without norms."""
    return norm_and_rotate(q_BSHD, k_BSGD, cos_BSR, sin_BSR, interleaved=interleaved)


def _has_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor | None, Tensor | None]) -> bool:
    dtypes = {x.dtype for x in weights if x is not None}
    return fits(q, k, cos, sin, *weights) and q.dtype == k.dtype and len(dtypes) <= 1 and q.shape[-1] <= MAX_HEAD_DIM


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q has the shape {tuple(q.shape)!r} and k {tuple(k.shape)!r}; both must be (batch, positions, heads, "
            "dim), of the same batch and positions"
        )
    if cos.shape != sin.shape or cos.ndim != 3:
        raise ValueError(
            f"cos has the shape {tuple(cos.shape)!r} and sin {tuple(sin.shape)!r}; both must be (batch, positions, dim)"
        )
    if cos.shape[0] not in {1, q.shape[0]} or cos.shape[1] != q.shape[1]:
        raise ValueError(
            f"q has the shape {tuple(q.shape)!r} and cos {tuple(cos.shape)!r}; cos must be of the same positions, and "
            "of the same batch or of a batch of one"
        )
    rotary_dim, head_dim = cos.shape[-1], q.shape[-1]
    if rotary_dim > head_dim or rotary_dim % 2 or k.shape[-1] != head_dim:
        raise ValueError(
            f"q has the shape {tuple(q.shape)!r}, k {tuple(k.shape)!r} and cos {tuple(cos.shape)!r}: heads of q and k "
            "must be equally large, and the last dim of cos even and no larger"
        )


def _check_weights(head_dim: int, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(
                f"{name} has the shape {tuple(weight.shape)!r}; it must be ({head_dim!r},), one per head dim"
            )
