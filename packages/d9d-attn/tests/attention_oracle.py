"""Attention written from the definition, and the backends that tests compare to it."""

import math

import pytest
import torch

from d9d.attn import (
    AttentionMask,
    EagerAttentionConfig,
    Feature,
    FlashAttention2Config,
    FlashAttention4Config,
    FlexAttentionConfig,
    TorchAttentionConfig,
)

CONFIGS = {
    "eager": EagerAttentionConfig(),
    "torch": TorchAttentionConfig(),
    "flex": FlexAttentionConfig(compiled=False),
    "flash_attention_2": FlashAttention2Config(),
    "flash_attention_4": FlashAttention4Config(),
}
EAGER, TORCH = CONFIGS["eager"].build(), CONFIGS["torch"].build()


def can(config, *features):
    return config.capabilities.features.issuperset(features)


def of_backends(names, cases, *, where):
    """Parametrizes the fixture `config` and more: each backend with those of the cases that it can be asked for."""
    chosen = [(kind, *case) for kind, config in CONFIGS.items() for case in cases if where(config, *case)]
    return pytest.mark.parametrize(("config", *names), chosen, indirect=["config"])


with_sinks_if_any = of_backends(
    ("has_sinks",), [(False,), (True,)], where=lambda config, has_sinks: not has_sinks or can(config, Feature.SINKS)
)


def sees(mask, b, h, s, t, queries, keys):
    """Whether query s of head h sees key t, one rule at a time."""
    at = s + keys - queries
    if mask.causal and t > at:
        return False
    if mask.window is not None and abs(at - t) >= mask.window:
        return False
    if mask.documents is not None:
        ends = mask.documents.cu_seqlens.tolist()[1:]
        of_query, of_key = (next((i for i, e in enumerate(ends) if b * keys + x < e), None) for x in (at, t))
        if of_query is None or of_query != of_key:
            return False
    if mask.bias is not None:
        value = mask.bias.expand(mask.bias.shape[0], mask.bias.shape[1], queries, keys)
        value = value[b % value.shape[0], h % value.shape[1], s, t].item()
        return value if isinstance(value, bool) else value > -math.inf
    return True


def oracle(q, k, v, mask, scale, sinks=None, soft_cap=None):
    """Result and log-sum-exp by a loop over batch, heads and queries; differentiable."""
    batch, queries, heads, _ = q.shape
    keys, key_heads = k.shape[1:3]
    rows, lses = [], []
    for b in range(batch):
        for s in range(queries):
            for h in range(heads):
                g = h * key_heads // heads
                seen = [t for t in range(keys) if sees(mask, b, h, s, t, queries, keys)]
                scores = (k[b, seen, g] @ q[b, s, h]) * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if mask.additive is not None and seen:
                    bias = mask.bias.expand(mask.bias.shape[0], mask.bias.shape[1], queries, keys)
                    scores = scores + bias[b % bias.shape[0], h % bias.shape[1], s, seen]
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h, None]])
                lses.append(scores.logsumexp(0) if len(scores) else q.new_tensor(-torch.inf))
                rows.append(scores.softmax(0)[: len(seen)] @ v[b, seen, g])
    lse = torch.stack(lses).view(batch, queries, heads).transpose(1, 2)
    return torch.stack(rows).view(batch, queries, heads, -1), lse


def values_and_gradients(attend, inputs, upstream):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, upstream, materialize_grads=True)


def without_bias(mask):
    return AttentionMask(causal=mask.causal, window=mask.window, documents=mask.documents)
