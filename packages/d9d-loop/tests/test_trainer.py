"""A run against plain torch on whole global batches, in every layout."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d9d.loop import evaluate
from d9d.mesh.testing import run_world

sys.path.insert(0, str(Path(__file__).parent))
from tiny_runs import TinyLM, TinyTask, collate, config, context, log, samples, trainer, weights

pytestmark = pytest.mark.usefixtures("one_thread")


def clone_of(run):
    """The same weights in a plain module."""
    clone = TinyLM(0.0).double()
    clone.load_state_dict(weights(run))
    return clone


def plain_torch(run, data, steps):
    """The losses and the final weights of plain torch on whole global batches, from the weights of a run."""
    clone = clone_of(run)
    matrices = [p for p in clone.parameters() if p.ndim >= 2]
    others = [p for p in clone.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        batch = collate([data[run.batches.order[position]] for position in range(step * 8, step * 8 + 8)])
        loss = F.cross_entropy(clone(batch["tokens"], None).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(clone.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        losses.append(loss.item())
    return losses, clone.state_dict()


def test_a_run_equals_plain_torch(ctx, tmp_path):
    data = samples([1, 7, 3, 5, 8, 2, 6, 4, 0, 8, 1, 5])
    made = trainer(ctx, config(tmp_path, microbatch=2), dataset=data)
    losses, final = plain_torch(made, data, 6)
    made.run()
    lines = log(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-9)
    assert [line["lr"] for line in lines[:3]] == [5e-3, 1e-2, 1e-2]
    for name, value in weights(made).items():
        torch.testing.assert_close(value, final[name], rtol=1e-9, atol=1e-12)


def layouts(directory):
    """On 4 ranks: the same global batch as dp 4, and as dp 4 with accumulation."""
    found = {}
    with context(replicate=-1) as ctx:
        for microbatch in (1, 2):
            made = trainer(ctx, config(Path(directory) / f"{ctx.world_size}-{microbatch}", microbatch=microbatch))
            made.run()
            found[microbatch] = weights(made)
        uneven = evaluate(
            made.executor, TinyTask(), samples(range(1, 9)), collate=collate, microbatch=1 + ctx.world_size, ctx=ctx
        )
    return found, uneven.sum, uneven.weight


def one_and_seven_and_three_and_five(directory):
    """Case 1: on 2 ranks, 2 microbatches each, with 1, 7, 3 and 5 valid labels."""
    data = samples([1, 7, 3, 5])
    with context(replicate=2) as ctx:
        made = trainer(ctx, config(directory, global_batch=4, steps=1, max_norm=None), dataset=data)
        result = made.train_step()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in made.stages[0].named_parameters()}
    return result.total.sum, result.total.weight, gradients


def test_the_same_global_batch_gives_the_same_update_in_every_layout(ctx, tmp_path):
    """Cases 1, 7, 8 and 41."""
    whole = trainer(ctx, config(tmp_path / "1-8", microbatch=8))
    whole.run()
    reference = weights(whole)
    everything = evaluate(whole.executor, TinyTask(), samples(range(1, 9)), collate=collate, microbatch=3, ctx=ctx)
    assert everything.weight == 36
    for size in (2, 4):
        for found, loss, weight in run_world(size, layouts, str(tmp_path)):
            for update in found.values():
                for name, value in update.items():
                    torch.testing.assert_close(value, reference[name], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(loss, everything.sum, rtol=1e-9, atol=0)
            assert weight == 36
        for microbatch in (1, 2):
            for line, expected in zip(log(tmp_path / f"{size}-{microbatch}"), log(tmp_path / "1-8"), strict=True):
                for name in ("step", "loss", "grad_norm", "lr", "tokens", "accuracy"):
                    assert line[name] == pytest.approx(expected[name], rel=1e-9)

    clone = clone_of(trainer(ctx, config(tmp_path / "case1")))
    batch = collate(samples([1, 7, 3, 5]))
    out = clone(batch["tokens"], None).flatten(0, 1)
    (F.cross_entropy(out, batch["labels"].flatten(), ignore_index=-100, reduction="sum") / 16).backward()
    for _, weight, gradients in run_world(2, one_and_seven_and_three_and_five, str(tmp_path / "case1-2")):
        assert weight == 16
        for name, parameter in clone.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_step_without_any_label_is_defined_and_logged(ctx, tmp_path):
    """Case 7, on all ranks."""
    made = trainer(ctx, config(tmp_path, steps=2), dataset=samples([0]))
    before = weights(made)
    made.run()
    assert [(line["loss"], line["grad_norm"], line["tokens"]) for line in log(tmp_path)] == [(0.0, 0.0, 0)] * 2
    assert all(line["accuracy"] == "nan" for line in log(tmp_path))
    assert torch.equal(weights(made)["head.bias"], before["head.bias"])  # biases do not decay


def test_evaluate_counts_every_sample_once_and_keeps_the_mode(ctx, tmp_path):
    made = trainer(ctx, config(tmp_path), dropout=0.5)
    data = samples([1, 7, 3, 5, 8])
    one = [evaluate(made.executor, TinyTask(), data, collate=collate, microbatch=n, ctx=ctx) for n in (1, 2, 7)]
    assert [int(total.weight) for total in one] == [24, 24, 24]
    assert [float(total.sum) for total in one] == pytest.approx([float(one[0].sum)] * 3)
    assert made.stages[0].training
    with pytest.raises(ValueError, match="empty data set"):
        evaluate(made.executor, TinyTask(), [], collate=collate, microbatch=1, ctx=ctx)


def test_memory_is_flat_over_100_steps_with_logging(ctx, tmp_path):
    """Case 48: no tensor and no object stays behind a step."""
    made = trainer(ctx, config(tmp_path, steps=120, checkpoint_every=40))
    alive = []

    def counting(step=made.train_step):
        if made.step in {10, 110}:
            gc.collect()
            alive.append(len(gc.get_objects()))
        return step()

    made.train_step = counting
    made.run()
    assert len(log(tmp_path)) == 120
    assert alive[1] - alive[0] < 100
