"""Certificates of pipelines, and planted faults that they name."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d9d.mesh import DistContext, MeshConfig
from d9d.parallel import LossSum, StageInfo, certify, parallelize_replicate
from d9d.parallel.certify import Staged
from d9d.parallel.pipeline import Interleaved1F1B, OneFOneB, ZeroBubbleV, distribute_layers

VOCABULARY, WIDTH, LAYERS = 11, 6, 4


class Part(nn.Module):
    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.stage = stage
        if stage.is_first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layers = distribute_layers(LAYERS, stage.count)[stage.index]
        self.layers = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in layers})
        if stage.is_last:
            self.head = nn.Linear(WIDTH, VOCABULARY)
            if stage.is_first:
                self.head.weight = self.embed.weight

    def tied_parameters(self) -> dict[str, str]:
        if self.stage.is_first == self.stage.is_last:
            return {}
        return {"embedding": "embed.weight" if self.stage.is_first else "head.weight"}

    def forward(self, inputs: Tensor, shared: Tensor) -> Tensor:
        x = self.embed(inputs) if self.stage.is_first else inputs
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return self.head(x) if self.stage.is_last else x


def model() -> nn.Module:
    return part(StageInfo())


def part(stage: StageInfo) -> nn.Module:
    with torch.device("meta"):
        return Part(stage)


def lay_out(module: nn.Module, context: DistContext) -> None:
    parallelize_replicate(module, context.mesh("dense")["dp_replicate"])


def inputs(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def loss(out: Tensor, labels: Tensor) -> LossSum:
    total = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return LossSum(total, (labels != -100).sum())


def loss_of(module: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    return loss(module(*batch), batch[1])


def split(batch: tuple[Tensor, Tensor], index: int, count: int) -> tuple[Tensor, Tensor]:
    return tuple(tensor.tensor_split(count)[index] for tensor in batch)


def make_batch() -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(VOCABULARY, (2, 8, 5), generator=torch.Generator().manual_seed(5))
    for row, count in enumerate((1, 5, 3, 2, 4, 0, 5, 1)):
        labels[row, count:] = -100
    return ids, labels


BOTH = (OneFOneB(), ZeroBubbleV())


def certificate(meshes, *, stage=part, schedules=BOTH):
    staged = Staged(stage=stage, inputs=inputs, loss=loss, schedules=schedules)
    return certify(model, lay_out, loss_of, split, make_batch(), meshes=meshes, staged=staged)


def test_a_pipeline_passes_beside_layouts_without_one():
    found = certificate([MeshConfig(replicate=2), MeshConfig(pipeline=2), MeshConfig(pipeline=2, replicate=2)])
    found.check()
    assert [{c.schedule for c in layout.comparisons} for layout in found.layouts] == [
        {""},
        {"1f1b", "zbv"},
        {"1f1b", "zbv"},
    ]
    names = {c.name for c in found.layouts[1].comparisons if c.rank == 0 and c.schedule == "1f1b"}
    assert {"embed.weight", "layers.0.weight"} <= names
    assert "layers.3.weight" not in names


class Untied(Part):
    def tied_parameters(self) -> dict[str, str]:
        return {}


def untied(stage: StageInfo) -> nn.Module:
    with torch.device("meta"):
        return Untied(stage)


class Doubling(Part):
    def forward(self, inputs: Tensor, shared: Tensor) -> Tensor:
        if inputs.is_floating_point() and inputs.requires_grad:
            inputs.register_hook(lambda gradient: 2 * gradient)
        return super().forward(inputs, shared)


def doubling(stage: StageInfo) -> nn.Module:
    with torch.device("meta"):
        return Doubling(stage)


def without_a_layer(stage: StageInfo) -> nn.Module:
    module = part(stage)
    if stage.is_last:
        del module.layers[str(LAYERS - 1)]
    return module


def test_planted_faults_are_named():
    mesh = MeshConfig(pipeline=2)
    assert "head.weight" in str(certificate([mesh], stage=untied))
    report = str(certificate([mesh], stage=doubling, schedules=[ZeroBubbleV()]))
    assert "pipeline 2 failed in step 1, with 1 microbatch a data rank in the order of zbv" in report
    assert "ratio 8.0000" in report  # through three boundaries
    with pytest.raises(RuntimeError, match=r"lacks \['layers.3.bias', 'layers.3.weight'\]"):
        certificate([mesh], stage=without_a_layer)


def test_what_cannot_be_run_is_refused():
    plain = certify(model, lay_out, loss_of, split, make_batch(), meshes=[MeshConfig(pipeline=2)])
    assert "not given the model in stages" in plain.layouts[0].refusal
    too_deep = certificate([MeshConfig(pipeline=2)], schedules=[Interleaved1F1B(stages_per_rank=3)])
    assert too_deep.layouts[0].refusal.startswith("4 layers do not make 6 stages")
