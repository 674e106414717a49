"""The trainer on the stages of a pipeline."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from d9d.loop import Trainer, TrainerConfig, evaluate
from d9d.loop.optim import AdamWConfig, ConstantSchedule
from d9d.loop.track import JsonLinesConfig
from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_on_gpus, run_world
from d9d.parallel import ShardPolicy, parallelize_fsdp, parallelize_replicate
from d9d.parallel.pipeline import Inference, Interleaved1F1B, LoopedBFS, OneFOneB, ZeroBubbleV, distribute_layers

sys.path.insert(0, str(Path(__file__).parent))
from tiny_runs import TinyTask, log

VOCABULARY, WIDTH, LAYERS = 11, 8, 4
AS_STORED = ShardPolicy(compute_dtype=None, reduce_dtype=None, gathered_for="step")


class LM(nn.Module):
    """A stage of a tiny model whose head is its embedding."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        if stage.is_first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict(
            {str(i): nn.Linear(WIDTH, WIDTH) for i in distribute_layers(LAYERS, stage.count)[stage.index]}
        )
        if stage.is_last:
            self.head = nn.Linear(WIDTH, VOCABULARY)
            if stage.is_first:
                self.head.weight = self.embed.weight

    def tied_parameters(self):
        names = {"embed.weight": self.stage.is_first, "head.weight": self.stage.is_last}
        held = [name for name, is_here in names.items() if is_here]
        return {"embedding": held[0]} if len(held) == 1 else {}

    def forward(self, inputs, shared):
        x = self.embed(inputs) if self.stage.is_first else inputs
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return self.head(x) if self.stage.is_last else x


class Provider:
    def build(self, stage):
        return LM(stage)

    def parallelize(self, module, stage, ctx):
        mesh = ctx.mesh("dense")
        if ctx.config.shard > 1:
            parallelize_fsdp(module, mesh["dp_cp_shard"], policy=AS_STORED)
        else:
            parallelize_replicate(module, mesh["dp_replicate"])

    def mapper(self, module):
        return None

    def flops_per_token(self, sequence):
        return 0.0


class NextToken(TinyTask):
    def inputs(self, batch):
        return batch[:, 0], batch[:, 1]


def samples():
    """Tokens and labels, of which so many count."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(VOCABULARY, (12, 2, 8), generator=generator)
    for sample, count in zip(made, [1, 7, 3, 5, 8, 2, 6, 4, 0, 8, 1, 5]):
        sample[1, count:] = -100
    return made


def trainer(ctx, directory, steps, **changes):
    made = TrainerConfig(
        directory=Path(directory),
        steps=steps,
        global_batch=8,
        dtype="float64",
        optimizer=AdamWConfig(lr=1e-2),
        schedule=ConstantSchedule(),
        trackers=(JsonLinesConfig(),),
        **changes,
    )
    return Trainer(made, ctx=ctx, provider=Provider(), task=NextToken(), dataset=samples(), collate=torch.stack)


def found_by(made, ctx):
    """Stages held, weights, and loss on all samples."""
    total = evaluate(made.executor, NextToken(), samples(), collate=torch.stack, microbatch=1, ctx=ctx)
    weights = {name: parameter.full_tensor().detach().cpu() for name, parameter in made.named_parameters().items()}
    return list(made.stages), weights, total.sum.cpu()


# Two steps each, in one directory: every run goes on from the checkpoint of another layout.
RELAY = [
    ({"pipeline": 2, "replicate": 2}, ZeroBubbleV(), 2, 2),  # its first and last stage are on one rank
    ({"pipeline": 2, "replicate": 2}, Interleaved1F1B(), 1, 4),
    ({"replicate": 4}, OneFOneB(), 1, 6),
    ({"pipeline": 4}, OneFOneB(), 2, 8),
]
RELAY_OF_TWO = [
    ({"pipeline": 2}, ZeroBubbleV(), 2, 2),
    ({"shard": 2}, LoopedBFS(), 1, 4),  # two stages on each rank, both sharded
    ({"replicate": 2}, OneFOneB(), 1, 6),
    ({"pipeline": 2}, OneFOneB(), 2, 8),
]


def relay(legs, directory, device):
    found = []
    for degrees, schedule, microbatch, steps in legs:
        with DistContext.launch(MeshConfig(**degrees), device) as ctx:
            made = trainer(ctx, directory, steps, pipeline=schedule, microbatch=microbatch)
            assert made.step == steps - 2
            made.run()
            found.append(found_by(made, ctx))
    return found


def assert_one_run(legs, directory, device, ranks):
    """That what `ranks` found after each leg, and what they logged, is that of one process."""
    with DistContext.launch(MeshConfig(), device) as ctx:
        for leg, (*_, steps) in enumerate(legs):
            made = trainer(ctx, directory / "one", steps)
            made.run()
            _, expected, expected_loss = found_by(made, ctx)
            names = set()
            for _, weights, loss in (rank[leg] for rank in ranks):
                names |= weights.keys()
                torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=0)
                for name, weight in weights.items():
                    torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12)
            assert names == expected.keys()
    for line, truth in zip(log(directory / "relay"), log(directory / "one"), strict=True):
        for name in ("step", "loss", "grad_norm", "tokens", "accuracy"):
            assert line[name] == pytest.approx(truth[name], rel=1e-9), (line["step"], name)


def test_a_run_that_is_handed_from_layout_to_layout_is_that_of_one_process(tmp_path):
    ranks = run_world(4, relay, RELAY, str(tmp_path / "relay"), "cpu")
    assert [[held for held, *_ in rank] for rank in ranks] == [
        [[0, 3], [0, 2], [0], [0]],
        [[0, 3], [0, 2], [0], [1]],
        [[1, 2], [1, 3], [0], [2]],
        [[1, 2], [1, 3], [0], [3]],
    ]
    assert_one_run(RELAY, tmp_path, "cpu", ranks)


@pytest.mark.gpu
def test_a_run_that_is_handed_over_on_gpus_is_that_of_one_process(tmp_path):
    run_on_gpus(Path(__file__).with_name("nccl_relay.py"), str(tmp_path), ranks=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [[held for held, *_ in rank] for rank in ranks] == [[[0, 3], [0, 1], [0], [0]], [[1, 2], [0, 1], [0], [1]]]
    assert_one_run(RELAY_OF_TWO, tmp_path, "cuda", ranks)  # draws differ between devices


def test_a_schedule_without_backward_is_refused_before_anything_is_built(tmp_path):
    with DistContext.launch(MeshConfig(), "cpu") as ctx, pytest.raises(ValueError, match="'inference', which has no"):
        trainer(ctx, tmp_path, 2, pipeline=Inference())
    assert not list(tmp_path.iterdir())
