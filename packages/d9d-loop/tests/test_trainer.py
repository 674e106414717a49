import gc
import json
import math
import random
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d9d.loop import Trainer, TrainerConfig, WeightedMean, evaluate
from d9d.loop.optim import AdamWConfig, ConstantSchedule
from d9d.loop.track import JsonLinesConfig, TrackerConfig
from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import WorldError, run_world
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
    state = run.stages[0].state_dict()
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in state.items()}


def log(directory):
    return [json.loads(line) for line in (Path(directory) / "log.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ctx():
    with context() as made:
        yield made


# --- against an oracle: one process, plain torch, the whole global batch at once


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


# --- layouts


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


# --- kill and resume


def without_speed(lines):
    return [
        {name: value for name, value in line.items() if name not in {"seconds", "tokens_per_second", "memory_gib"}}
        for line in lines
    ]


@attrs.frozen(kw_only=True)
class DrawingConfig(TrackerConfig):
    """Of a tracker that draws random numbers, as rich does when it is imported."""

    kind: ClassVar[str] = "drawing"

    def open(self, directory, *, done, steps):
        random.random()
        return JsonLinesConfig(name="drawing.jsonl").open(directory, done=done, steps=steps)


def interrupted(directory, size):
    """20 steps in one go, and in three processes' worth of trainers; with dropout, bf16 and a log line every 3."""
    changes = {"dtype": "bfloat16", "log_every": 3, "checkpoint_every": 5, "steps": 20}
    changes["trackers"] = (JsonLinesConfig(), DrawingConfig())
    results = []
    with context(replicate=-1) as ctx:
        for name, stops in {"whole": [20], "parts": [10, 17, 20]}.items():
            place = Path(directory) / f"{name}-{size}"
            for stop in stops:
                torch.rand(ctx.rank + stop)  # another process, another random state
                random.seed(stop)
                made = trainer(ctx, config(place, **changes), dropout=0.3)
                resumed = made.step
                if stop < 20:
                    with pytest.raises(KeyboardInterrupt):
                        stop_after(made, stop)
                else:
                    made.run()
            state = {name: as_local(value) for name, value in made.optimizer.named_state().items()}
            results.append(
                (resumed, weights(made), state, torch.tensor([*torch.get_rng_state(), *random.randbytes(8)]))
            )
    return results


def stop_after(made, stop):
    step = made.train_step

    def stopping():
        if made.step == stop:
            raise KeyboardInterrupt
        return step()

    made.train_step = stopping
    made.run()


def check_interrupted(directory, size, results):
    for (_, whole, whole_state, whole_random), (resumed, parts, state, parts_random) in results:
        assert resumed == 15
        assert all(torch.equal(value, parts[name]) for name, value in whole.items())
        assert all(torch.equal(value, state[name]) for name, value in whole_state.items())
        assert torch.equal(whole_random, parts_random)
    lines = log(directory / f"parts-{size}")
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 15, 18, 20]
    assert without_speed(lines) == without_speed(log(directory / f"whole-{size}"))


def as_local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_a_resumed_run_is_bit_equal(tmp_path):
    """Cases 31 and 34: weights, masters, moments, dropout and metrics."""
    check_interrupted(tmp_path, 1, [interrupted(str(tmp_path), 1)])
    on_two_ranks = run_world(2, interrupted, str(tmp_path), 2)
    check_interrupted(tmp_path, 2, on_two_ranks)
    (_, _, _, first), (_, _, _, second) = (rank[0] for rank in on_two_ranks)
    assert not torch.equal(first, second)


def dropout_across_a_resume(directory):
    """On 4 ranks, under every layout: masks of 4 steps in one go, and of the last 2 after a resume."""
    found = {}
    for degrees in ({"replicate": 4}, {"shard": 4}, {"replicate": 2, "shard": 2}):
        with context(**degrees) as ctx:
            place = Path(directory) / "-".join(f"{name}{degree}" for name, degree in degrees.items())
            runs = []
            for name, stops in {"whole": [4], "parts": [2, 4]}.items():
                masks = []
                for stop in stops:
                    made = trainer(ctx, config(place / name, checkpoint_every=2, steps=4), dropout=0.5)
                    made.stages[0].dropout.register_forward_hook(lambda *call, to=masks: to.append(call[-1] == 0))
                    if stop < 4:
                        with pytest.raises(KeyboardInterrupt):
                            stop_after(made, stop)
                        random.seed(ctx.rank)  # another process, other random states
                        torch.manual_seed(0)
                    else:
                        made.run()
                runs.append((torch.stack(masks), weights(made), random.random()))
            (masks, whole, drawn), (parts_masks, parts, parts_drawn) = runs
            assert torch.equal(masks, parts_masks)
            assert all(torch.equal(value, parts[name]) for name, value in whole.items())
            assert drawn == parts_drawn
            found[str(degrees)] = (masks, drawn)
    return found


def test_dropout_differs_between_data_ranks_and_goes_on_after_a_resume(tmp_path):
    """Case 34, under replicate, shard and hybrid."""
    ranks = run_world(4, dropout_across_a_resume, str(tmp_path))
    assert len(ranks[0]) == 3
    for degrees in ranks[0]:
        masks = [rank[degrees][0] for rank in ranks]
        assert all(not torch.equal(masks[a], masks[b]) for a in range(4) for b in range(a))
        assert len({rank[degrees][1] for rank in ranks}) == 4


def continue_elsewhere(directory):
    with context(replicate=2) as ctx:
        made = trainer(ctx, config(directory))
        resumed = made.step
        made.run()
    return resumed, weights(made)


def test_a_run_goes_on_with_another_number_of_ranks(ctx, tmp_path):
    whole = trainer(ctx, config(tmp_path / "whole"))
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        stop_after(trainer(ctx, config(tmp_path / "moved", checkpoint_every=3)), 4)
    for resumed, update in run_world(2, continue_elsewhere, str(tmp_path / "moved")):
        assert resumed == 3
        for name, value in weights(whole).items():
            torch.testing.assert_close(update[name], value, rtol=1e-9, atol=1e-12)


def test_a_finished_run_does_nothing(ctx, tmp_path):
    trainer(ctx, config(tmp_path)).run()
    before = log(tmp_path)
    trainer(ctx, config(tmp_path)).run()
    assert log(tmp_path) == before


# --- what goes wrong


def test_after_a_step_that_failed_the_same_trainer_runs_a_good_one(ctx, tmp_path):
    """Case 46: in the second microbatch of the step, in collate and in the model."""
    data = samples([1, 7, 3, 5, 8, 2, 6, 4])
    good = trainer(ctx, config(tmp_path / "good", steps=2, microbatch=2), dataset=data)
    good.run()
    made = trainer(ctx, config(tmp_path / "bad", steps=2, microbatch=2), dataset=list(data))
    index = made.batches.indices(0)[1][1]
    for broken in (
        {"tokens": torch.zeros(3, dtype=torch.int64), "labels": data[index]["labels"]},
        {"tokens": torch.full_like(data[index]["tokens"], VOCABULARY + 1), "labels": data[index]["labels"]},
    ):
        made.batches.dataset[index] = broken
        with pytest.raises((RuntimeError, IndexError)):
            made.run()
        assert made.step == 0
    made.batches.dataset[index] = data[index]
    made.run()
    assert all(torch.equal(value, weights(made)[name]) for name, value in weights(good).items())
    assert without_speed(log(tmp_path / "bad"))[0]["loss"] == log(tmp_path / "good")[0]["loss"]


class PoisonedTask(TinyTask):
    """Its third loss is not a number."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def loss(self, out, shared):
        self.calls += 1
        total = super().loss(out, shared)
        return LossSum(total.sum * (math.nan if self.calls == 3 else 1.0), total.weight)


def clean_run_whose_third_step(ctx, directory, optimizer_step):
    """A run without a bad batch whose third optimizer step is another one."""
    made = trainer(ctx, config(directory))
    step = made.optimizer.step

    def stepping():
        if made.step == 2:
            optimizer_step(made, step)
        else:
            step()

    made.optimizer.step = stepping
    made.run()
    return weights(made), log(directory)


def with_zero_gradients(made, step):
    for parameter in made.stages[0].parameters():
        parameter.grad.zero_()
    step()


@pytest.mark.parametrize(("nonfinite", "instead"), [("skip", lambda made, step: None), ("zero", with_zero_gradients)])
def test_a_step_that_is_not_finite_is_skipped_or_made_of_zeros(ctx, tmp_path, nonfinite, instead):
    """Case 12: it counts as a step all the same."""
    made = trainer(ctx, config(tmp_path / "bad", nonfinite=nonfinite), task=PoisonedTask())
    made.run()
    expected, lines = clean_run_whose_third_step(ctx, tmp_path / "clean", instead)
    assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())
    found = log(tmp_path / "bad")
    assert [line["nonfinite_steps"] for line in found] == [0, 0, 1, 1, 1, 1]
    assert (found[2]["loss"], found[2]["grad_norm"]) == ("nan", "nan")
    for name in ("step", "lr", "tokens"):
        assert [line[name] for line in found] == [line[name] for line in lines]
    assert found[-1]["loss"] == lines[-1]["loss"]
    assert trainer(ctx, config(tmp_path / "bad", nonfinite=nonfinite)).nonfinite_steps == 1


def test_a_step_that_is_not_finite_ends_the_run_by_default_and_has_not_been_made(ctx, tmp_path):
    made = trainer(ctx, config(tmp_path / "bad"), task=PoisonedTask())
    with pytest.raises(
        FloatingPointError, match=r"norm of the gradients is nan, from 'embed.weight' of shape \(11, 8\)"
    ):
        made.run()
    assert made.step == 2
    made.run()
    expected, _ = clean_run_whose_third_step(ctx, tmp_path / "clean", lambda made, step: step())
    assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_built(ctx, tmp_path):
    with pytest.raises(ValueError, match=r"global_batch=8 does not divide into 1 data ranks × microbatch=3; set"):
        trainer(ctx, config(tmp_path, microbatch=3))
    assert trainer(ctx, config(tmp_path)).batches.accumulation == 1
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_run_is_refused(ctx, tmp_path):
    trainer(ctx, config(tmp_path, steps=1)).run()
    with pytest.raises(ValueError, match=r"step 1 belongs to another run: seed=0 is now 3, global_batch=8 is now 4"):
        trainer(ctx, config(tmp_path, seed=3, global_batch=4))


def refused_degree():
    with context(context=2) as ctx:
        trainer(ctx, config("unused"))


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


def test_a_metric_that_is_new_starts_empty(ctx, tmp_path):
    class MoreMetrics(TinyTask):
        def metrics(self):
            return {**super().metrics(), "more": WeightedMean()}

    build(ctx, tmp_path, steps=2).run()
    resumed = build(ctx, tmp_path, steps=4, task=MoreMetrics())
    assert resumed.step == 2


def test_a_metric_may_not_take_the_name_of_a_number_of_the_log(ctx, tmp_path):
    class Hiding(TinyTask):
        def metrics(self):
            return {"loss": self.accuracy}

    with pytest.raises(ValueError, match=r"metrics called \['loss'\]"):
        build(ctx, tmp_path, task=Hiding())


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(ctx, tmp_path):
    class Extra(TinyLM):
        def get_extra_state(self):
            return {"calls": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(TypeError, match="'_extra_state' is a dict"):
        build(ctx, tmp_path, model=Extra)


class TiedLM(TinyLM):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.hidden = nn.Linear(8, 8)
        self.head.weight = self.embed.weight


def test_a_tied_weight_is_saved_once_and_comes_back(ctx, tmp_path):  # case 17
    run = build(ctx, tmp_path, model=TiedLM)
    run.run()
    resumed = build(ctx, tmp_path, model=TiedLM)
    saved = list(resumed.checkpoints.latest().source)
    assert [name for name in saved if name.startswith("model.")] == [
        "model.embed.weight",
        "model.head.bias",
        "model.hidden.bias",
        "model.hidden.weight",
    ]
    assert all(map(torch.equal, weights(run).values(), weights(resumed).values()))
    assert torch.equal(resumed.stages[0].head.weight, resumed.stages[0].embed.weight)


def test_degrees_that_the_trainer_cannot_use_are_refused():
    with pytest.raises(WorldError, match=r"mesh.context=2: .* set mesh.context to 1"):
        run_world(2, refused_degree)


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


@pytest.mark.gpu
def test_a_step_on_cuda_does_not_wait_for_the_device_and_resumes_bit_equal(tmp_path):
    results = []
    with DistContext.launch(MeshConfig(), device_type="cuda") as ctx:
        for name, stops in {"whole": [6], "parts": [3, 6]}.items():
            for stop in stops:
                made = trainer(
                    ctx, config(tmp_path / name, dtype="bfloat16", checkpoint_every=3, nonfinite="zero"), dropout=0.3
                )
                made.train_step = without_waiting(made.train_step)
                if stop < 6:
                    with pytest.raises(KeyboardInterrupt):
                        stop_after(made, stop)
                else:
                    made.run()
            results.append(weights(made))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert without_speed(log(tmp_path / "parts")) == without_speed(log(tmp_path / "whole"))


def without_waiting(step):
    def guarded():
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded
