"""The feed-forward layers of public models, values and all gradients."""

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from d9d.moe import (
    ClampedSwiGLU,
    GroupedSwiGLU,
    GroupLimited,
    MoELayer,
    PlainGatedActivation,
    SelectedSoftmaxScoring,
    SigmoidScoring,
    SoftmaxScoring,
    SwiGLU,
    TopKRouter,
)

torch.set_num_threads(1)
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 6, 5, 8, 3


def same(tensor):
    return tensor


def transposed(tensor):
    return tensor.transpose(1, 2)


def experts(names):
    return {f"experts.{name}": (f"experts.{name}", same) for name in names}


def qwen3():
    theirs = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
        )
    )
    ours = MoELayer(TopKRouter(HIDDEN, EXPERTS, TOP_K), GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE))
    return theirs, ours, {"gate.weight": ("router.weight", same), **experts(["gate_up_proj", "down_proj"])}


def qwen2():
    theirs = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            shared_expert_intermediate_size=4,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=False,
        )
    )
    ours = MoELayer(
        TopKRouter(HIDDEN, EXPERTS, TOP_K, scoring=SoftmaxScoring(renormalize=False)),
        GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE),
        shared=SwiGLU(HIDDEN, 4),
        shared_gate=True,
    )
    shared = {f"shared_expert.{n}_proj.weight": (f"shared.{n}_proj.weight", same) for n in ("gate", "up", "down")}
    names = {"gate.weight": ("router.weight", same), **experts(["gate_up_proj", "down_proj"]), **shared}
    return theirs, ours, {**names, "shared_expert_gate.weight": ("shared_gate.weight", same)}


def deepseek_v3():
    theirs = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    )
    router = TopKRouter(
        HIDDEN,
        EXPERTS,
        TOP_K,
        scoring=SigmoidScoring(),
        selection=GroupLimited(groups=4, top_groups=2),
        scale=2.5,
        expert_bias=True,
        logits_in_fp32=True,
    )
    ours = MoELayer(
        router, GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE), shared=SwiGLU(HIDDEN, 2 * INTERMEDIATE, fused=False)
    )
    router.expert_bias.normal_(std=0.2)
    theirs.gate.e_score_correction_bias.copy_(router.expert_bias)
    shared = {f"shared_experts.{n}_proj.weight": (f"shared.{n}_proj.weight", same) for n in ("gate", "up", "down")}
    return theirs, ours, {"gate.weight": ("router.weight", same), **experts(["gate_up_proj", "down_proj"]), **shared}


def gpt_oss():
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    theirs = GptOssMLP(config)
    activation = PlainGatedActivation(ClampedSwiGLU(), interleaved=True)
    ours = MoELayer(
        TopKRouter(HIDDEN, EXPERTS, TOP_K, scoring=SelectedSoftmaxScoring(), bias=True),
        GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE, activation=activation, bias=True),
    )
    with torch.no_grad():
        ours.experts.gate_up_proj.mul_(20)  # so that the clamps are reached
    names = {f"router.{name}": (f"router.{name}", same) for name in ("weight", "bias")}
    names |= {f"experts.{name}_proj": (f"experts.{name}_proj", transposed) for name in ("gate_up", "down")}
    names |= {f"experts.{name}_proj_bias": (f"experts.{name}_bias", same) for name in ("gate_up", "down")}
    return theirs, ours, names


@pytest.mark.parametrize("model", [qwen3, qwen2, deepseek_v3, gpt_oss])
# transformers computes scores of the first three in fp32 even for fp64, hence the tolerance there.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-6)])
def test_layer_equals_transformers_in_values_and_gradients(model, dtype, tolerance):
    torch.manual_seed(0)
    theirs, ours, names = (part.to(dtype) if isinstance(part, torch.nn.Module) else part for part in model())
    their_parameters, our_parameters = dict(theirs.named_parameters()), dict(ours.named_parameters())
    assert names.keys() == their_parameters.keys()
    assert {name for name, _ in names.values()} == our_parameters.keys()
    with torch.no_grad():
        for their_name, (our_name, form) in names.items():
            their_parameters[their_name].copy_(form(our_parameters[our_name]))
    x = torch.randn(2, 9, HIDDEN, dtype=dtype)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = ours(x_ours), theirs(x_theirs)
    expected = expected[0] if isinstance(expected, tuple) else expected
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x_ours.grad, x_theirs.grad, rtol=tolerance, atol=tolerance)
    for their_name, (our_name, form) in names.items():
        found, wanted = form(our_parameters[our_name].grad), their_parameters[their_name].grad
        assert wanted.any()
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * max(1.0, float(wanted.abs().max())))
