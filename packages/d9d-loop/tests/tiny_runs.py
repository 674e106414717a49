"""Runs of a tiny language model whose samples have as many labels as a test asks for."""

import json
from pathlib import Path

import attrs
import torch
from torch import nn
from torch.nn import functional as F

from d9d.loop import Trainer, TrainerConfig, WeightedMean
from d9d.loop.optim import AdamWConfig, ConstantSchedule
from d9d.loop.track import JsonLinesConfig
from d9d.mesh import DistContext, MeshConfig
from d9d.parallel import LossSum, ShardPolicy, parallelize_fsdp, parallelize_hsdp, parallelize_replicate

VOCABULARY = 11


class TinyLM(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, inputs, shared):
        return self.head(self.dropout(self.hidden(self.embed(inputs)).tanh()))


@attrs.frozen(kw_only=True)
class TinyProvider:
    dropout: float = 0.0

    def build(self, stage):
        return TinyLM(self.dropout)

    def parallelize(self, module, stage, ctx):
        if ctx.config.shard == 1:
            parallelize_replicate(module, ctx.mesh("batch")["dp"])
            return
        policy = ShardPolicy(compute_dtype=None, reduce_dtype=None)
        dense = ctx.mesh("dense")
        for unit in (module.hidden, module):
            if ctx.config.replicate == 1:
                parallelize_fsdp(unit, dense["dp_cp_shard"], policy=policy)
            else:
                mesh = dense["dp_replicate", "dp_cp_shard"]
                parallelize_hsdp(unit, mesh, shard_dim="dp_cp_shard", policy=policy)

    def mapper(self, module):
        return None

    def flops_per_token(self, sequence):
        return 6.0 * (8 * 16 + 16 * VOCABULARY)


class TinyTask:
    def __init__(self):
        self.accuracy = WeightedMean()

    def inputs(self, batch):
        return batch["tokens"], batch["labels"]

    def loss(self, out, shared):
        counted = shared != -100
        self.accuracy.update(((out.argmax(-1) == shared) & counted).sum(), counted.sum())
        loss = F.cross_entropy(out.flatten(0, 1), shared.flatten(), ignore_index=-100, reduction="sum")
        return LossSum(loss, counted.sum())

    def metrics(self):
        return {"accuracy": self.accuracy}


def samples(counts, length=8):
    """One sample for each count, with that many labels that count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for count in counts:
        tokens = torch.randint(VOCABULARY, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[count:] = -100
        made.append({"tokens": tokens[:-1], "labels": labels})
    return made


def collate(items):
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def config(directory, **changes):
    return TrainerConfig(
        **{
            "directory": Path(directory),
            "steps": 6,
            "global_batch": 8,
            "dtype": "float64",
            "optimizer": AdamWConfig(lr=1e-2),
            "schedule": ConstantSchedule(warmup=2),
            "trackers": (JsonLinesConfig(),),
        }
        | changes
    )


def context(**degrees):
    return DistContext.launch(MeshConfig(**degrees), device_type="cpu")


def trainer(ctx, made, *, dropout=0.0, dataset=None, task=None):
    data = samples([1, 7, 3, 5, 8, 2, 6, 4, 0, 8, 1, 5]) if dataset is None else dataset
    return Trainer(
        made, ctx=ctx, provider=TinyProvider(dropout=dropout), task=task or TinyTask(), dataset=data, collate=collate
    )


def weights(run):
    """Copies, which the next step leaves as they are."""
    state = run.stages[0].state_dict()
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)().clone() for name, tensor in state.items()}


def log(directory):
    return [json.loads(line) for line in (Path(directory) / "log.jsonl").read_text().splitlines()]


def without_speed(lines):
    return [
        {name: value for name, value in line.items() if name not in {"seconds", "tokens_per_second", "memory_gib"}}
        for line in lines
    ]


def stop_after(made, stop):
    step = made.train_step

    def stopping():
        if made.step == stop:
            raise KeyboardInterrupt
        return step()

    made.train_step = stopping
    made.run()


def build(ctx, directory, *, model=TinyLM, task=None, **changes):
    """A trainer of a model that differs from `TinyLM`, or with another task."""

    class Provider(TinyProvider):
        def build(self, stage):
            return model(0.0)

    return Trainer(
        config(directory, **changes),
        ctx=ctx,
        provider=Provider(),
        task=task or TinyTask(),
        dataset=samples([1, 7, 3]),
        collate=collate,
    )
