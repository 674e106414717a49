"""A run that was stopped goes on as if it had not been."""

import random
import sys
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
import torch
from torch import nn

from d9d.loop import WeightedMean
from d9d.loop.track import JsonLinesConfig, TrackerConfig
from d9d.mesh import DistContext, MeshConfig
from d9d.mesh.testing import run_world

sys.path.insert(0, str(Path(__file__).parent))
from tiny_runs import TinyLM, TinyTask, build, config, context, log, stop_after, trainer, weights, without_speed

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_checkpoint_of_another_run_is_refused(ctx, tmp_path):
    trainer(ctx, config(tmp_path, steps=1)).run()
    with pytest.raises(ValueError, match=r"step 1 belongs to another run: seed=0 is now 3, global_batch=8 is now 4"):
        trainer(ctx, config(tmp_path, seed=3, global_batch=4))


def test_a_metric_that_is_new_starts_empty(ctx, tmp_path):
    class WithMetrics(TinyTask):
        def __init__(self, *names):
            super().__init__()
            self.names = names

        def metrics(self):
            return {**super().metrics(), **{name: WeightedMean() for name in self.names}}

    run = build(ctx, tmp_path, task=WithMetrics("more.top"))
    run.train_step()
    run.save()  # between two lines of the log
    resumed = build(ctx, tmp_path, task=WithMetrics("more", "more.top"))  # a name that the other one begins with
    gathered = run.metrics["accuracy"].state_dict()["gathered"]
    assert gathered[1] > 0
    assert torch.equal(resumed.metrics["accuracy"].state_dict()["gathered"], gathered)
    assert resumed.metrics["more"].state_dict()["gathered"].tolist() == [0, 0]


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
    parameters = ["embed.weight", "head.bias", "hidden.bias", "hidden.weight"]
    assert [name for name in saved if name.startswith("model.")] == [f"model.{name}" for name in parameters]
    assert {name.rpartition(".")[0] for name in saved if name.startswith("optimizer.")} == {
        f"optimizer.{name}" for name in parameters
    }
    assert all(map(torch.equal, weights(run).values(), weights(resumed).values()))
    assert resumed.stages[0].head.weight is resumed.stages[0].embed.weight


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
