"""Two attention layers of public models, as transformers computes them, in values and all gradients."""

import attrs
import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from d9d.attn import (
    AttentionMask,
    Documents,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    Llama3Scaling,
    RotaryConfig,
    RotaryEmbedding,
    YarnScaling,
)

torch.set_num_threads(1)
HIDDEN, LENGTH, WINDOW = 32, 12, 4
SHAPE = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
COMMON = {**SHAPE, "num_hidden_layers": 2, "attn_implementation": "eager", "max_position_embeddings": 4096}
OURS = GroupedQueryAttentionConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=16)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}


@attrs.frozen(kw_only=True)
class Model:
    theirs: type
    rotary: type
    config: object
    ours: tuple[GroupedQueryAttentionConfig, GroupedQueryAttentionConfig]
    ours_rotary: RotaryConfig


def twice(**settings):
    return (attrs.evolve(OURS, **settings),) * 2


MODELS = {
    "qwen3": lambda: Model(
        theirs=modeling_qwen3.Qwen3Attention,
        rotary=modeling_qwen3.Qwen3RotaryEmbedding,
        config=Qwen3Config(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        ours=twice(qk_norm=True),
        ours_rotary=RotaryConfig(head_dim=16, base=1e6),
    ),
    "llama3": lambda: Model(
        theirs=modeling_llama.LlamaAttention,
        rotary=modeling_llama.LlamaRotaryEmbedding,
        config=LlamaConfig(**COMMON, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
        ours=twice(),
        ours_rotary=RotaryConfig(
            head_dim=16,
            base=5e5,
            scaling=Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=64),
        ),
    ),
    "gpt-oss": lambda: Model(
        theirs=modeling_gpt_oss.GptOssAttention,
        rotary=modeling_gpt_oss.GptOssRotaryEmbedding,
        config=GptOssConfig(
            **COMMON,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, **YARN},
        ),
        ours=tuple(
            attrs.evolve(OURS, qkv_bias=True, output_bias=True, sinks=True, window=window) for window in (WINDOW, None)
        ),
        ours_rotary=RotaryConfig(
            head_dim=16, base=150000.0, scaling=YarnScaling(factor=32.0, original_length=64, truncate=False)
        ),
    ),
    "gemma2": lambda: Model(
        theirs=modeling_gemma2.Gemma2Attention,
        rotary=modeling_gemma2.Gemma2RotaryEmbedding,
        config=Gemma2Config(
            **COMMON,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            attn_logit_softcapping=1.5,
            query_pre_attn_scalar=9,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        ours=tuple(attrs.evolve(OURS, soft_cap=1.5, scale=1 / 3, window=window) for window in (WINDOW, None)),
        ours_rotary=RotaryConfig(head_dim=16, base=1e4),
    ),
    "qwen3-next": lambda: Model(
        theirs=modeling_qwen3_next.Qwen3NextAttention,
        rotary=modeling_qwen3_next.Qwen3NextRotaryEmbedding,
        config=Qwen3NextConfig(
            **COMMON,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        ),
        ours=twice(qk_norm=True, zero_centered_norm=True, output_gate=True),
        ours_rotary=RotaryConfig(head_dim=16, base=1e7, rotary_dim=4),
    ),
}
BATCHES = {
    "offset positions": (torch.stack([torch.arange(LENGTH) + 700, torch.arange(LENGTH)]), None),
    "packed": (
        torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 0, *range(10)]]),
        [[5, 7], [1, 1, 10]],
    ),
}


def dense_mask(lengths, window, dtype):
    """Additive, (B, 1, S, S), by a rule per pair."""
    rows = []
    for row in lengths or [[LENGTH]] * 2:
        of = [i for i, length in enumerate(row) for _ in range(length)]
        sees = [
            [t <= s and of[s] == of[t] and (not window or s - t < window) for t in range(LENGTH)] for s in range(LENGTH)
        ]
        rows.append(torch.tensor(sees))
    visible = torch.stack(rows)[:, None]
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def run_theirs(model, layers, x, upstream, positions, lengths):
    x = x.clone().requires_grad_()
    tables = model.rotary(model.config)(x, positions)
    y = x
    for layer in layers:
        mask = dense_mask(lengths, getattr(layer, "sliding_window", None), x.dtype)
        y = y + layer(hidden_states=y, position_embeddings=tables, attention_mask=mask)[0]
    return gradients(y, x, layers, upstream)


def run_ours(model, layers, x, upstream, positions, lengths):
    x = x.clone().requires_grad_()
    cos, sin = RotaryEmbedding(model.ours_rotary)(positions)
    mask = AttentionMask(documents=None if lengths is None else Documents.from_lengths(lengths))
    y = x
    for layer in layers:
        y = y + layer(y, cos=cos, sin=sin, mask=mask)
    return gradients(y, x, layers, upstream)


def gradients(y, x, layers, upstream):
    named = {"x": x, **{name: p for name, p in layers.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad(y, list(named.values()), upstream)
    return {"y": y, **dict(zip(named, found))}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_two_layers_equal_transformers_in_values_and_all_gradients(name, batch):
    torch.manual_seed(0)
    model = MODELS[name]()
    positions, lengths = BATCHES[batch]
    ours = torch.nn.ModuleList(GroupedQueryAttention(config) for config in model.ours)
    theirs = torch.nn.ModuleList(model.theirs(model.config, i) for i in range(2))
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15)
    theirs.load_state_dict(ours.state_dict())  # the names are theirs
    x, upstream = torch.randn(2, LENGTH, HIDDEN), torch.randn(2, LENGTH, HIDDEN)

    expected = run_theirs(model, theirs, x, upstream, positions, lengths)
    found = run_ours(model, ours, x, upstream, positions, lengths)
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        error = (found[tensor] - value).norm() / value.norm()
        assert error < 3e-6, tensor

    half = [module.bfloat16() for module in (ours, theirs)]
    x, upstream = x.bfloat16(), upstream.bfloat16()
    of_ours = run_ours(model, half[0], x, upstream, positions, lengths)
    of_theirs = run_theirs(model, half[1], x, upstream, positions, lengths)
    exact = run_ours(model, ours.double(), x.double(), upstream.double(), positions, lengths)
    ours_off, theirs_off = (
        torch.stack([(of[name] - value).norm() / value.norm() for name, value in exact.items()])
        for of in (of_ours, of_theirs)
    )
    assert all(value.dtype == torch.bfloat16 for value in of_ours.values())
    # Each rounds elsewhere; on the whole we are no further from the truth than they are.
    assert ours_off.max() < 0.05
    assert ours_off.square().mean() < 1.5 * theirs_off.square().mean()
