"""Steps that fail or are not finite, and runs that are refused before anything is built."""

import math
import sys
from pathlib import Path

import pytest
import torch

from d9d.mesh.testing import WorldError, run_world
from d9d.parallel import LossSum

sys.path.insert(0, str(Path(__file__).parent))
from tiny_runs import (
    VOCABULARY,
    TinyLM,
    TinyTask,
    build,
    config,
    context,
    log,
    samples,
    trainer,
    weights,
    without_speed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_after_a_step_that_failed_the_same_trainer_runs_a_good_one(ctx, tmp_path):
    """Case 46: in the second microbatch of the step, in collate and in the model."""
    data = samples([1, 7, 3, 5, 8, 2, 6, 4])
    good = trainer(ctx, config(tmp_path / "good", steps=2, microbatch=2), dataset=data)
    good.run()
    made = trainer(ctx, config(tmp_path / "bad", steps=2, microbatch=2), dataset=list(data))
    index = made.batches.indices(0)[1][1]
    for tokens, error, message in (
        (torch.zeros(3, dtype=torch.int64), RuntimeError, "stack expects each tensor to be equal size"),
        (torch.full_like(data[index]["tokens"], VOCABULARY + 1), IndexError, "index out of range in self"),
    ):
        made.batches.dataset[index] = {"tokens": tokens, "labels": data[index]["labels"]}
        with pytest.raises(error, match=message):
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


def refused_degree():
    with context(context=2) as ctx:
        trainer(ctx, config("unused"))


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


def test_degrees_that_the_trainer_cannot_use_are_refused():
    with pytest.raises(WorldError, match=r"mesh.context=2: .* set mesh.context to 1"):
        run_world(2, refused_degree)
