"""Qwen3-MoE as Hugging Face's `transformers` keeps it on disk."""

from collections.abc import Mapping
from typing import Any

from d9d.ckpt import Concatenate, Mapper, Parallel, Rename, Sequential, Stack

from ._config import Qwen3MoEConfig

_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "moe_norm",
    "mlp.gate": "moe.router",
}


def mapper_from_hugging_face(config: Qwen3MoEConfig) -> Mapper:
    """From names and shapes of Hugging Face's files to those of `Qwen3MoEForCausalLM`; its inverse exports.

    On disk every expert has a gate, an up and a down projection of its own; here the experts of a layer are stacked,
    gate above up.
    """
    here, there = "layers.{layer}", "model.layers.{layer}"
    expert, experts = f"{there}.mlp.experts.{{expert}}", f"{here}.moe.experts"
    leaves: list[Mapper] = [
        Rename("model.embed_tokens.weight", "embedding.weight"),
        Rename("model.norm.weight", "norm.weight"),
        *(Rename(f"{there}.{old}.weight", f"{here}.{new}.weight") for old, new in _LAYER.items()),
        Sequential(
            Concatenate(
                [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"],
                f"{expert}.gate_up_proj.weight",
                sizes=[config.expert_size, config.expert_size],
            ),
            Stack(f"{expert}.gate_up_proj.weight", f"{experts}.gate_up_proj", count=config.num_experts),
        ),
        Stack(f"{expert}.down_proj.weight", f"{experts}.down_proj", count=config.num_experts),
    ]
    if not config.tie_embeddings:
        leaves.append(Rename("lm_head.weight", "head.weight"))
    return Parallel(*leaves)


def config_to_hugging_face(config: Qwen3MoEConfig, *, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        config: The model.
        dtype: Of the weights beside it, as torch names it without the module ("bfloat16").
    """
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.renormalize,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def config_from_hugging_face(config: Mapping[str, Any]) -> Qwen3MoEConfig:
    """The model that a ``config.json`` describes.

    Raises:
        ValueError: It is another architecture, or has features that `Qwen3MoEForCausalLM` does not have.
    """
    if config.get("model_type") != "qwen3_moe":
        raise ValueError(f"this is a config of model_type {config.get('model_type')!r}, not 'qwen3_moe'")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refused = {
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "attention_bias": bool(config.get("attention_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "rope_parameters": rope.get("rope_type", "default") != "default",
    }
    if found := [f"{name} = {config.get(name)!r}" for name, is_set in refused.items() if is_set]:
        raise ValueError(f"Qwen3MoEForCausalLM has nothing for {', '.join(found)}")
    heads = config["num_attention_heads"]
    return Qwen3MoEConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        num_experts=config.get("num_experts") or config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        expert_size=config["moe_intermediate_size"],
        renormalize=config["norm_topk_prob"],
        rope_base=float(rope.get("rope_theta") or config["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
        tie_embeddings=config["tie_word_embeddings"],
        max_positions=config["max_position_embeddings"],
    )
