"""Balance and z-losses of routers under data, context and expert parallelism and microbatches, by certificate."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig
from d9d.moe import (
    BalanceLoss,
    ClampedSwiGLU,
    GroupedSwiGLU,
    MoELayer,
    PlainGatedActivation,
    SelectedSoftmaxScoring,
    SigmoidScoring,
    SwiGLU,
    TopKRouter,
    ZLoss,
)
from d9d.parallel import (
    LossSum,
    ShardPolicy,
    certify,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)

AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)
VOCABULARY, HIDDEN, EXPERTS = 17, 8, 8
LOSSES = [BalanceLoss(coefficient=0.5), ZLoss(coefficient=0.1)]

Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Two mixtures of experts, as DeepSeek and gpt-oss have them; token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        activation = PlainGatedActivation(ClampedSwiGLU(), interleaved=True)
        self.layers = nn.ModuleList(
            [
                MoELayer(
                    TopKRouter(HIDDEN, EXPERTS, 3, scoring=SigmoidScoring(), scale=1.5, losses=LOSSES),
                    GroupedSwiGLU(EXPERTS, HIDDEN, 8),
                    shared=SwiGLU(HIDDEN, 8),
                    shared_gate=True,
                ),
                MoELayer(
                    TopKRouter(HIDDEN, EXPERTS, 2, scoring=SelectedSoftmaxScoring(), bias=True, losses=LOSSES),
                    GroupedSwiGLU(EXPERTS, HIDDEN, 8, activation=activation, bias=True),
                ),
            ]
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.context = 1, 0

    def forward(self, batch: Batch) -> LossSum:
        degree, rank = self.context
        ids, labels = (tensor.tensor_split(degree, dim=1)[rank] for tensor in batch)
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, mask=ids != 0)
        counts = labels >= 0
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        return LossSum(losses, counts.sum())


def lay_out(model: Model, context: DistContext) -> None:
    config = context.config
    if config.context > 1:
        group = context.mesh("batch").get_group("cp")
        model.context = config.context, context.mesh("batch").get_local_rank("cp")
        for layer in model.layers:
            layer.set_sequence_group(group)
    if config.expert > 1:
        experts = context.mesh("expert")["ep_replicate", "ep_shard", "ep"]
        policy = AS_STORED if config.shard > 1 or experts["ep_shard"].size() > 1 else None
        for layer in model.layers:
            parallelize_expert_parallel(layer, experts, policy=policy)
    dense = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
    if config.shard == 1:
        parallelize_replicate(model, dense)
        return
    for unit in [*model.layers, model]:
        if config.replicate == 1:
            parallelize_fsdp(unit, dense["dp_cp_shard"], policy=AS_STORED)
        else:
            parallelize_hsdp(unit, dense, shard_dim="dp_cp_shard", policy=AS_STORED)


def loss(model: Model, batch: Batch) -> LossSum:
    return model(batch)


def split(batch: Batch, index: int, count: int) -> Batch:
    ids, labels = batch
    return ids.tensor_split(count)[index], labels.tensor_split(count)[index]


def make_batch() -> Batch:
    """Sequences of unequal length, padded, with unequal numbers of labels."""
    ids = torch.randint(1, VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    for row in range(8):
        ids[row, 3 + row * 5 % 6 :] = 0
        labels[row, 1 + row * 3 % 7 :] = -100
    return ids, labels


MESHES = [
    MeshConfig(replicate=2, context=2, expert=2),
    MeshConfig(shard=2, context=2, expert=4),
    MeshConfig(context=4, expert=2),
]


def test_losses_of_routers_depend_on_no_layout():
    certify(Model, lay_out, loss, split, make_batch(), meshes=MESHES, max_norms=[None]).check()


def forget_the_group(model: Model, context: DistContext) -> None:
    lay_out(model, context)
    for layer in model.layers:
        layer.set_sequence_group(None)


def test_the_certificate_sees_sequences_balanced_by_their_parts():
    with pytest.raises(AssertionError, match="gradient"):
        certify(Model, forget_the_group, loss, split, make_batch(), meshes=[MeshConfig(context=2)]).check()
