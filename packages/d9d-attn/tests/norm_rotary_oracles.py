"""Norm and rotation as their papers write them: complex numbers turn, and every pair is picked by index."""

import torch


def normalize(x, weight, *, eps, zero_centered):
    """Of the last dim."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + (1.0 if zero_centered else 0.0))


def normed(operands, weight, *, eps, zero_centered):
    """The norm of a sum, and the sum if it is one of several."""
    total = sum(operands[1:], operands[0])
    y = normalize(total, weight, eps=eps, zero_centered=zero_centered)
    return (y,) if len(operands) == 1 else (y, total)


def rotate(x, cos, sin, *, interleaved):
    """x (B, S, H, D) by cosines and sines (B, S, R) of which the first half is read."""
    pairs = cos.shape[-1] // 2
    index = torch.arange(pairs, device=x.device)
    first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + pairs)
    turn = torch.complex(cos[..., :pairs], sin[..., :pairs])[:, :, None]
    turned = torch.complex(x[..., first], x[..., second]) * turn
    return x.index_copy(-1, first, turned.real).index_copy(-1, second, turned.imag)


def attended(q, k, cos, sin, q_weight, k_weight, *, eps, zero_centered, interleaved):
    """As `norm_and_rotate`."""
    q, k = (
        x if w is None else normalize(x, w, eps=eps, zero_centered=zero_centered)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    return rotate(q, cos, sin, interleaved=interleaved), rotate(k, cos, sin, interleaved=interleaved)
