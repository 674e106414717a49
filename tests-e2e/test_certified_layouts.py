"""Our models under every layout of pipeline, replicate, shard and expert that 4 ranks have, and some of 8.

The table in docs/layouts.md is what this test has run. To write it anew:

    D9D_WRITE_DOCS=1 uv run pytest tests-e2e/test_certified_layouts.py
"""

import os
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn

from d9d.attn import (
    AttentionMask,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RMSNorm,
    RotaryConfig,
    RotaryEmbedding,
)
from d9d.mesh import DistContext, MeshConfig
from d9d.models import CausalLMContext, CausalLMOutput, LanguageModelingHead, TokenEmbedding
from d9d.models.qwen3_moe import Qwen3MoEConfig, Qwen3MoEForCausalLM, parallelize_qwen3_moe
from d9d.moe import SwiGLU
from d9d.parallel import (
    Certificate,
    LossSum,
    ShardPolicy,
    StageInfo,
    certify,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)
from d9d.parallel.certify import Staged, every_mesh
from d9d.parallel.pipeline import DualPipeV, Interleaved1F1B, OneFOneB, ZeroBubbleH1, ZeroBubbleV

DOCUMENT = Path(__file__).parents[1] / "docs" / "layouts.md"
AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)
CONFIG = Qwen3MoEConfig(
    vocab_size=61,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=8,
    top_k=3,
    expert_size=8,
    rope_base=10_000.0,
)


def moe() -> nn.Module:
    with torch.device("meta"):
        return Qwen3MoEForCausalLM(CONFIG)


def moe_tied() -> nn.Module:
    with torch.device("meta"):
        return Qwen3MoEForCausalLM(attrs.evolve(CONFIG, tie_embeddings=True))


def deep() -> Qwen3MoEConfig:
    """With a layer for each of 4 ranks, or for two stages on each of 2."""
    return attrs.evolve(CONFIG, num_layers=4)


def deep_moe() -> nn.Module:
    with torch.device("meta"):
        return Qwen3MoEForCausalLM(deep())


def stage_of_deep_moe(stage: StageInfo) -> nn.Module:
    with torch.device("meta"):
        return Qwen3MoEForCausalLM(deep(), stage)


def deep_moe_tied() -> nn.Module:
    with torch.device("meta"):
        return Qwen3MoEForCausalLM(attrs.evolve(deep(), tie_embeddings=True))


def stage_of_deep_moe_tied(stage: StageInfo) -> nn.Module:
    with torch.device("meta"):
        return Qwen3MoEForCausalLM(attrs.evolve(deep(), tie_embeddings=True), stage)


def lay_out_moe(module: Qwen3MoEForCausalLM, context: DistContext) -> None:
    parallelize_qwen3_moe(module, context, policy=AS_STORED)


class DenseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        attention = GroupedQueryAttentionConfig(hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, qkv_bias=True)
        self.attention_norm, self.attention = RMSNorm(16), GroupedQueryAttention(attention)
        self.mlp_norm, self.mlp = RMSNorm(16), SwiGLU(16, 24)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos=cos, sin=sin, mask=mask)
        return x + self.mlp(self.mlp_norm(x))


class DenseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rotary = TokenEmbedding(61, 16), RotaryEmbedding(RotaryConfig(head_dim=8))
        self.layers = nn.ModuleList(DenseLayer() for _ in range(2))
        self.norm, self.head = RMSNorm(16), LanguageModelingHead(16, 61)
        self.head.tie(self.embedding)

    def forward(self, ids: Tensor, shared: CausalLMContext):
        x = self.embedding(ids)
        cos, sin = self.rotary(shared.position_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, shared.mask)
        return self.head(self.norm(x), shared.labels)


def dense() -> nn.Module:
    with torch.device("meta"):
        return DenseModel()


def lay_out_dense(module: DenseModel, context: DistContext) -> None:
    config = context.config
    if config.pipeline * config.context * config.tensor * config.expert > 1:
        raise ValueError("a dense model is laid out over replicate and shard so far")
    mesh = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
    if config.shard == 1:
        parallelize_replicate(module, mesh)
        return
    for unit in [*module.layers, [module.embedding, module.head], module]:
        if config.replicate == 1:
            parallelize_fsdp(unit, mesh["dp_cp_shard"], policy=AS_STORED)
        else:
            parallelize_hsdp(unit, mesh, shard_dim="dp_cp_shard", policy=AS_STORED)


def inputs_of(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, CausalLMContext]:
    ids, labels = batch
    return ids, CausalLMContext(position_ids=torch.arange(ids.shape[1]).expand_as(ids), labels=labels)


def loss_of(out: CausalLMOutput, shared: CausalLMContext) -> LossSum:
    return out.loss


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    return module(*inputs_of(batch)).loss


def split(batch: tuple[Tensor, Tensor], index: int, count: int) -> tuple[Tensor, Tensor]:
    return tuple(tensor.tensor_split(count)[index] for tensor in batch)


def make_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of unequal numbers of labels, some of none."""
    ids = torch.randint(61, (rows, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    for row in range(rows):
        labels[row, (row * 5 + 1) % 9 :] = -100
    return ids, labels


HEADER = """\
# Certified layouts

What `d9d.parallel.certify` has run on CPU ranks against one process in fp64: a step without clipping and one with it,
of 2 microbatches a data rank. In layouts that passed, the initial weights, loss, weight, norm, every gradient and every
updated parameter agree with those of one process within 1e-9 on every rank, and all ranks hold the same bits.

`tests-e2e/test_certified_layouts.py` writes this page, and fails if a run finds otherwise.
"""

FOUR = every_mesh(4, ["replicate", "shard", "expert"])
EIGHT = [
    MeshConfig(replicate=2, shard=4, expert=2),
    MeshConfig(replicate=2, shard=4, expert=8),
]
NOT_YET = [MeshConfig(**{degree: 4}) for degree in ("context", "tensor")]
# On 2 ranks a stage each, or two; with 4 ranks there are no layers for more.
PIPELINES = [
    MeshConfig(pipeline=2, replicate=2),
    MeshConfig(pipeline=2, replicate=2, expert=2),
    MeshConfig(pipeline=2, shard=2),
    MeshConfig(pipeline=2, shard=2, expert=2),
]


def certificates() -> dict[str, Certificate]:
    def run(model, lay_out, meshes, rows=8, stage=None, schedules=()):
        staged = Staged(stage=stage, inputs=inputs_of, loss=loss_of, schedules=schedules) if stage else None
        batch = make_batch(rows)
        return certify(model, lay_out, loss, split, batch, meshes=meshes, microbatches=[2], staged=staged)

    return {
        "Qwen3-MoE": run(moe, lay_out_moe, [*FOUR, *EIGHT, *NOT_YET], rows=16),
        "Qwen3-MoE, embeddings tied": run(
            moe_tied, lay_out_moe, [MeshConfig(replicate=4, expert=4), MeshConfig(shard=4)]
        ),
        "Qwen3-MoE in a pipeline by ZBV": run(deep_moe, lay_out_moe, PIPELINES, 8, stage_of_deep_moe, [ZeroBubbleV()]),
        "Qwen3-MoE in a pipeline by 1F1B and ZB-H1": run(
            deep_moe, lay_out_moe, [MeshConfig(pipeline=4)], 8, stage_of_deep_moe, (OneFOneB(), ZeroBubbleH1())
        ),
        "Qwen3-MoE in a pipeline, embeddings tied, by interleaved 1F1B and DualPipeV": run(
            deep_moe_tied,
            lay_out_moe,
            [MeshConfig(pipeline=2), MeshConfig(pipeline=2, shard=2)],
            8,
            stage_of_deep_moe_tied,
            (Interleaved1F1B(), DualPipeV()),
        ),
        "Dense": run(dense, lay_out_dense, [*every_mesh(4, ["replicate", "shard"]), *NOT_YET]),
    }


def document(found: dict[str, Certificate]) -> str:
    sections = [f"\n## {model}\n\n{certificate.markdown()}\n" for model, certificate in found.items()]
    return "".join([HEADER, *sections])


def test_the_layouts_in_the_docs_are_certified():
    found = certificates()
    for certificate in found.values():
        certificate.check(allow_refused=True)
        refused = {layout.mesh for layout in certificate.layouts if layout.verdict == "refused"}
        assert refused <= set(NOT_YET)
    written = document(found)
    if os.environ.get("D9D_WRITE_DOCS"):
        DOCUMENT.write_text(written, encoding="utf-8")
    if DOCUMENT.read_text(encoding="utf-8") != written:
        pytest.fail(f"{DOCUMENT.name} is not what was run; D9D_WRITE_DOCS=1 writes it anew")
