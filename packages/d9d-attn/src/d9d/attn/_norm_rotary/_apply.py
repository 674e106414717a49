"""The public functions, and which way they go.

Shapes: B batch, S positions, H query heads, G key heads, D head dim, R rotary dim.
"""

from torch import Tensor

from ._reference import norm_and_rotate_one


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
        cos_BSR: From `RotaryEmbedding`; entries i and i + R / 2 are the same, and only the first half is read.
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
    of_all = {"eps": eps, "zero_centered": zero_centered, "interleaved": interleaved}
    return (
        norm_and_rotate_one(q_BSHD, cos, sin, q_weight, **of_all),
        norm_and_rotate_one(k_BSGD, cos, sin, k_weight, **of_all),
    )


def apply_rotary(
    q_BSHD: Tensor, k_BSGD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn the first R dims of every head of q and k, pair by pair; see `norm_and_rotate`, without norms."""
    return norm_and_rotate(q_BSHD, k_BSGD, cos_BSR, sin_BSR, interleaved=interleaved)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    rotary_dim, head_dim = cos.shape[-1], q.shape[-1]
    if rotary_dim > head_dim or rotary_dim % 2 or k.shape[-1] != head_dim:
        raise ValueError(
            f"q has the shape {tuple(q.shape)!r}, k {tuple(k.shape)!r} and cos {tuple(cos.shape)!r}: heads of q and k "
            "must be equally large, and the last dim of cos even and no larger"
        )
    if cos.shape != sin.shape or cos.ndim != 3:
        raise ValueError(
            f"cos has the shape {tuple(cos.shape)!r} and sin {tuple(sin.shape)!r}; both must be (batch, positions, dim)"
        )


def _check_weights(head_dim: int, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(
                f"{name} has the shape {tuple(weight.shape)!r}; it must be ({head_dim!r},), one per head dim"
            )
