"""One optimizer step under every layout against one process; fp64."""

import sys
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from d9d.mesh import DistContext, MeshConfig, materialize
from d9d.mesh.testing import run_world
from d9d.parallel import (
    GradientSync,
    LossSum,
    ShardPolicy,
    global_norm,
    is_fully_sharded,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    scale_and_clip_,
)

sys.path.insert(0, str(Path(__file__).parent))
from summing_collectives import Gather, Sum

VOCABULARY, WIDTH, EXPERTS = 13, 6, 4


class DenselyMixedExperts(nn.Module):
    """Every expert sees every token: the smallest module whose experts may live elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.group: ProcessGroup | None = None

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)

    def expert_parameters(self):
        yield self.weight

    def set_expert_group(self, group: ProcessGroup, *, dispatcher: str | None = None) -> None:
        self.group = group

    def forward(self, x_TH: Tensor) -> Tensor:
        share_TE = self.router(x_TH).softmax(-1)
        if self.group is None:
            return torch.einsum("te,th,ehg->tg", share_TE, x_TH, self.weight).tanh()
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        x = Gather.apply(x_TH, self.group)
        share = Gather.apply(share_TE, self.group).chunk(size, -1)[rank]
        y = Sum.apply(torch.einsum("te,th,ehg->tg", share, x, self.weight), self.group)
        return y.chunk(size)[rank].tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.moe = DenselyMixedExperts()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        return self.head(x + self.moe(self.frozen(x)))


def loss_sum(model: Model, ids: Tensor, labels: Tensor) -> LossSum:
    total = F.cross_entropy(model(ids), labels.flatten(), ignore_index=-100, reduction="sum")
    return LossSum(total, (labels != -100).sum())


def global_batch(valid: tuple[int, ...] = (1, 7, 3, 5, 0, 8, 2, 6)) -> tuple[Tensor, Tensor]:
    """Samples of 8 tokens, of which so many have labels."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (len(valid), 8), generator=generator)
    labels = torch.randint(VOCABULARY, (len(valid), 8), generator=generator)
    for row, count in enumerate(valid):
        labels[row, count:] = -100
    return ids, labels


@attrs.frozen
class Step:
    loss: float
    weight: int
    norm: float
    gradients: dict[str, Tensor]


def reference(valid: tuple[int, ...] = (1, 7, 3, 5, 0, 8, 2, 6), device: str = "cpu") -> Step:
    """Plain autograd of the mean over the whole batch; other devices draw other weights."""
    model = build(torch.device(device))
    loss = loss_sum(model, *(t.to(device) for t in global_batch(valid)))
    (loss.sum / loss.weight.clamp(min=1)).backward()
    gradients = {n: full_gradient(p) for n, p in trained(model)}
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    return Step(loss.mean().item(), int(loss.weight), norm, gradients)


def build(device: torch.device) -> Model:
    with torch.device("meta"):
        model = Model().to(torch.float64)
    materialize(model, device=device, seed=3)
    return model


def trained(model: nn.Module):
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def run_step(config: MeshConfig, accumulation: int, valid: tuple[int, ...], bucket_bytes: int = 32 << 20) -> Step:
    return step_of(DistContext.launch(config, "cpu"), accumulation, valid, bucket_bytes)


def step_of(context: DistContext, accumulation: int, valid: tuple[int, ...], bucket_bytes: int = 32 << 20) -> Step:
    config = context.config
    with torch.device("meta"):
        model = Model().to(torch.float64)
    if config.expert > 1:
        experts = context.mesh("expert")["ep_replicate", "ep_shard", "ep"]
        parallelize_expert_parallel(model.moe, experts, policy=AS_STORED if config.shard > 1 else None)
    dense = context.mesh("dense")["dp_replicate", "dp_cp_shard"]
    if config.shard == 1:
        parallelize_replicate(model, dense)
    else:
        for unit in (model.moe.router, [model.embed, model.head], model):
            if config.replicate > 1:
                parallelize_hsdp(unit, dense, shard_dim="dp_cp_shard", policy=AS_STORED)
            else:
                parallelize_fsdp(unit, dense["dp_cp_shard"], policy=AS_STORED)
    materialize(model, device=context.device, seed=3)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters["head.weight"] is parameters["embed.weight"]
    rest = [p for p in model.parameters() if not is_fully_sharded(p)]
    sync = GradientSync([rest], bucket_bytes=bucket_bytes, grad_dtype=torch.float64)
    batch = context.mesh("batch")
    rank, ranks = batch.get_local_rank("dp"), batch["dp"].size()
    ids, labels = (t.to(context.device).chunk(ranks)[rank].chunk(accumulation) for t in global_batch(valid))
    for _ in range(2):  # the second step must not see the first
        model.zero_grad()
        zero = torch.zeros((), dtype=torch.float64, device=context.device)
        totals = LossSum(zero, zero.long())
        for i in range(accumulation):
            with sync.microbatch(0, last=i == accumulation - 1):
                loss = loss_sum(model, ids[i], labels[i])
                loss.sum.backward()
            totals += loss.detach()
        sync.finish()
    for tensor in (totals.sum, totals.weight):
        dist.all_reduce(tensor, group=batch.get_group("dp"))
    norm = global_norm(model.parameters())
    scale_and_clip_(model.parameters(), weight=totals.weight, norm=norm, max_norm=None)
    gradients = {n: full_gradient(p) for n, p in trained(model)}
    weight = int(totals.weight)
    return Step(totals.mean().item(), weight, norm.item() / max(weight, 1), gradients)


def full_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()


def run_steps(cases) -> list[Step]:
    return [run_step(*case) for case in cases]


def assert_same(step: Step, expected: Step) -> None:
    assert step.weight == expected.weight
    torch.testing.assert_close(step.loss, expected.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(step.norm, expected.norm, rtol=1e-12, atol=1e-14)
    assert step.gradients.keys() == expected.gradients.keys()
    for name, gradient in step.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-11, atol=1e-15, msg=name)


AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None)
VALID = (1, 7, 3, 5, 0, 8, 2, 6)


@pytest.mark.parametrize(
    ("world", "experts"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4))],
)
def test_any_replication_experts_and_accumulation_give_the_update_of_one_process(world, experts):
    """Cases 1 and 8: every valid label weighs the same, wherever it is."""
    expected = reference()
    cases = [
        (MeshConfig(replicate=world, expert=e), accumulation, VALID, bucket_bytes)
        for e in experts
        for accumulation in (1, 2)
        for bucket_bytes in (1, 32 << 20)
    ]
    for steps in run_world(world, run_steps, cases, timeout=300.0):
        for step in steps:
            assert_same(step, expected)


@pytest.mark.parametrize(
    ("world", "meshes"),
    [
        (2, [(1, 2, 1), (1, 2, 2)]),
        (4, [(2, 2, 1), (1, 4, 2), (2, 2, 4)]),
    ],
)
def test_any_sharding_with_and_without_experts_gives_the_update_of_one_process(world, meshes):
    """Cases 11 and 13: ``(replicate, shard, expert)``, experts within and beyond a shard group."""
    expected = reference()
    cases = [
        (MeshConfig(replicate=r, shard=s, expert=e), accumulation, VALID)
        for r, s, e in meshes
        for accumulation in (1, 2)
    ]
    for steps in run_world(world, run_steps, cases, timeout=300.0):
        for step in steps:
            assert_same(step, expected)


def test_labels_ignored_in_a_microbatch_on_a_rank_and_everywhere():
    """Case 7."""
    some, none = (0, 0, 0, 0, 3, 0, 2, 6), (0,) * 8
    for partly, nothing in run_world(
        2, run_steps, [(MeshConfig(replicate=2, expert=2), 2, some), (MeshConfig(replicate=2), 2, none)]
    ):
        assert_same(partly, reference(some))
        assert nothing.loss == nothing.weight == nothing.norm == 0
        assert all(torch.equal(g, torch.zeros_like(g)) for g in nothing.gradients.values())
