"""Qwen3-MoE against the one of transformers."""

import json

import attrs
import pytest
import torch
from safetensors.torch import load_file

from d9d.ckpt import PlanError, TensorSpec, export, load, open_checkpoint
from d9d.mesh import DistContext, MeshConfig, materialize
from d9d.mesh.testing import run_world
from d9d.models import CausalLMContext
from d9d.models.qwen3_moe import (
    Qwen3MoEConfig,
    Qwen3MoEForCausalLM,
    config_from_hugging_face,
    config_to_hugging_face,
    mapper_from_hugging_face,
    parallelize_qwen3_moe,
)
from d9d.parallel import ShardPolicy, StageInfo

CONFIG = Qwen3MoEConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=12,  # so that 10 and 11 sort before 2 as text (case 25)
    top_k=3,
    expert_size=10,
    rope_base=10_000.0,
)


def theirs(config, directory):
    """A model of transformers with random weights, saved as it saves them."""
    import transformers  # noqa: PLC0415 - workers of test worlds import this file without needing it

    torch.manual_seed(0)
    their_config = transformers.Qwen3MoeConfig.from_dict(config_to_hugging_face(config, dtype="float32"))
    model = transformers.Qwen3MoeForCausalLM(their_config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


def ours(config, directory):
    model = Qwen3MoEForCausalLM(config).eval()
    load(open_checkpoint(directory), mapper_from_hugging_face(config), state_of(model))
    return model


def state_of(model):
    return dict(model.named_parameters())


def context(ids, labels=None):
    return CausalLMContext(position_ids=torch.arange(ids.shape[1]).expand(ids.shape), labels=labels)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path, tied):
    config = attrs.evolve(CONFIG, tie_embeddings=tied)
    their_model = theirs(config, tmp_path / "hf").double()
    their_model.set_experts_implementation("eager")  # their grouped product has no fp64
    assert config_from_hugging_face(json.loads((tmp_path / "hf/config.json").read_text())) == config
    our_model = ours(config, tmp_path / "hf").double()
    ids = torch.randint(61, (2, 9))
    expected = their_model(ids, labels=ids)
    torch.testing.assert_close(our_model(ids, context(ids)).logits, expected.logits, rtol=1e-6, atol=1e-6)
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    loss = our_model(ids, context(ids, labels)).loss
    torch.testing.assert_close(loss.mean(), expected.loss.double(), rtol=1e-6, atol=0)
    loss.mean().backward()
    expected.loss.backward()
    layer, their_layer = our_model.layers["1"], their_model.model.layers[1]
    for found, wanted in [
        (our_model.embedding.weight, their_model.model.embed_tokens.weight),
        (our_model.head.weight, their_model.lm_head.weight),
        (layer.attention.q_norm.weight, their_layer.self_attn.q_norm.weight),
        (layer.moe.router.weight, their_layer.mlp.gate.weight),
        (layer.moe.experts.gate_up_proj, their_layer.mlp.experts.gate_up_proj),
        (layer.moe.experts.down_proj, their_layer.mlp.experts.down_proj),
    ]:
        # They compute softmax and rotation in fp32 also in an fp64 model.
        assert (found.grad - wanted.grad).norm() < 1e-6 * wanted.grad.norm()


@pytest.mark.parametrize("tied", [False, True])
def test_goes_back_to_hugging_face_byte_identical(tmp_path, tied):
    config = attrs.evolve(CONFIG, tie_embeddings=tied)
    theirs(config, tmp_path / "hf")
    model = ours(config, tmp_path / "hf")
    assert (model.head.weight is model.embedding.weight) == tied
    export(state_of(model), mapper_from_hugging_face(config).inverse(), tmp_path / "back")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def test_configs_with_features_that_are_missing_here_are_refused():
    config = config_to_hugging_face(CONFIG, dtype="float32")
    with pytest.raises(ValueError, match=r"nothing for mlp_only_layers = \[1\], attention_bias = True"):
        config_from_hugging_face(config | {"mlp_only_layers": [1], "attention_bias": True})
    with pytest.raises(ValueError, match="model_type 'llama'"):
        config_from_hugging_face({"model_type": "llama"})


def test_counts_the_flops_of_the_eight_layer_card():
    card = Qwen3MoEConfig(
        vocab_size=151_936, hidden_size=2048, num_layers=8, num_heads=32, num_kv_heads=4, head_dim=128,
        num_experts=128, top_k=8, expert_size=768,
    )  # fmt: skip
    # 59,544 tokens/s are 322 TFLOP/s there (../shared/FIGURES.md)
    assert card.flops_per_token(4096) * 59_544 == pytest.approx(322e12, rel=2e-3)


def _losses(config: Qwen3MoEConfig, mesh: MeshConfig) -> list[float]:
    context_ = DistContext.launch(mesh, "cpu")
    with torch.device("meta"):
        model = Qwen3MoEForCausalLM(config).to(torch.float64)
    parallelize_qwen3_moe(model, context_, policy=ShardPolicy(compute_dtype=None, reduce_dtype=None))
    materialize(model, device=context_.device, seed=1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(61, (4, 9), generator=generator)
    with torch.no_grad():
        return [float(model(row[None], context(row[None], row[None])).loss.sum) for row in ids]


def _losses_of(meshes: list[MeshConfig]) -> list[list[float]]:
    with pytest.raises(
        ValueError, match=r"mesh.tensor = 4: Qwen3-MoE is laid out over pipeline, replicate, shard and expert"
    ):
        _losses(CONFIG, MeshConfig(tensor=4))
    with pytest.raises(ValueError, match="2 experts do not divide over 4 expert-parallel ranks"):
        _losses(attrs.evolve(CONFIG, num_experts=2, top_k=1), MeshConfig(replicate=4, expert=4))
    return [_losses(CONFIG, mesh) for mesh in meshes]


def test_the_same_seed_gives_the_same_model_under_every_layout():
    [expected] = run_world(1, _losses, CONFIG, MeshConfig())
    meshes = [MeshConfig(replicate=4 // s, shard=s, expert=e) for s, e in ((1, 1), (1, 2), (1, 4), (2, 4), (4, 2))]
    for per_rank in run_world(4, _losses_of, meshes, timeout=300.0):
        for losses in per_rank:
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_are_the_model_cut_in_parts(tied):
    config = attrs.evolve(CONFIG, num_layers=5, tie_embeddings=tied)
    with torch.device("meta"):
        whole = Qwen3MoEForCausalLM(config)
        stages = [Qwen3MoEForCausalLM(config, StageInfo(i, 3)) for i in range(3)]
    for module in (whole, *stages):
        materialize(module, device=torch.device("cpu"), seed=0)
    if tied:
        assert [stage.tied_parameters() for stage in stages] == [
            {"embedding": "embedding.weight"}, {}, {"embedding": "head.weight"}
        ]  # fmt: skip
        with torch.no_grad():
            stages[-1].head.weight.copy_(stages[0].embedding.weight)
    else:
        assert not any(stage.tied_parameters() for stage in stages)
        held = [name for stage in stages for name, _ in stage.named_parameters()]
        assert sorted(held) == sorted(name for name, _ in whole.named_parameters())
    tokens = torch.randint(61, (2, 7))
    shared = CausalLMContext(position_ids=torch.arange(7).expand(2, 7))
    x = tokens
    for stage in stages:
        x = stage(x, shared)
    assert torch.equal(x.logits, whole(tokens, shared).logits)


def test_a_stage_reads_its_own_tensors_and_the_whole_is_proven(tmp_path, monkeypatch):
    """Case 36."""
    config = attrs.evolve(CONFIG, num_layers=4)
    torch.manual_seed(0)
    whole = Qwen3MoEForCausalLM(config)
    mapper = mapper_from_hugging_face(config)
    export(state_of(whole), mapper.inverse(), tmp_path / "exported")
    source = open_checkpoint(tmp_path / "exported")
    target = {name: TensorSpec.of(parameter) for name, parameter in whole.named_parameters()}
    read, original = [], type(source).extents
    monkeypatch.setattr(
        type(source), "extents", lambda self, region: read.append(region.name) or original(self, region)
    )
    for index in range(3):
        stage = Qwen3MoEForCausalLM(config, StageInfo(index, 3))
        load(source, mapper, state_of(stage), target=target)
        assert all(torch.equal(p, whole.get_parameter(name)) for name, p in stage.named_parameters())
    assert sorted(read) == sorted(source)  # each by one stage, once
    with pytest.raises(PlanError, match="layers.3"):
        load(source, mapper, state_of(stage), target={n: spec for n, spec in target.items() if "layers.3" not in n})
