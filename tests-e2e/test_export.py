"""What the example exports is what it trained, to `transformers`."""

from pathlib import Path

import pretrain
import torch
from torch import Tensor

from d9d.ckpt import JobCheckpoints, Prefix, convert
from d9d.loop.config import load
from d9d.mesh import DistContext
from d9d.mesh.testing import run_world
from d9d.models import CausalLMContext
from d9d.models.qwen3_moe import mapper_from_hugging_face


def _train_and_score(config: pretrain.PretrainConfig, ids: Tensor) -> list[Tensor]:
    """Logits of the trained model, as it comes back from the last checkpoint; where the last stage is."""
    pretrain.main(config)
    pretrain.main(config)  # a finished run may be started again
    files, _ = pretrain.read_library(held_out_bytes=config.held_out_bytes)
    with DistContext.launch(config.mesh, config.device) as ctx, torch.no_grad():
        trainer = pretrain.build_trainer(config, files, ctx)
        assert trainer.step == config.trainer.steps
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        for stage in trainer.stages.values():
            stage.eval()
        return [out.logits for out in trainer.executor.infer([ids], [CausalLMContext(position_ids=positions)])]


def test_transformers_computes_the_logits_of_the_trained_model(script: Path, tiny, tmp_path):
    import transformers  # noqa: PLC0415 - workers of test worlds import this file without needing it

    # Four stages, of which the first and the last are on one rank. Layouts without a pipeline: test_kill_and_resume.
    layout = ["--mesh.pipeline", "2", "--trainer.pipeline.kind", "zbv", "--model.num_layers", "4"]
    arguments = [*tiny, *layout, "--trainer.steps", "20", "--trainer.optimizer.lr", "1e-2"]
    config = load(pretrain.PretrainConfig, script.with_name("small.toml"), arguments)
    ids = torch.randint(256, (2, 24))
    (logits,), nothing = run_world(2, _train_and_score, config, ids, timeout=300.0)
    assert nothing == []
    assert logits.std() > 0.1  # it has learned to prefer some bytes

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/hugging_face-20", dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, logits, rtol=1e-5, atol=1e-5)

    # the same from the last checkpoint of the job, by one process without a trainer
    exported = tmp_path / "run/hugging_face-20"
    checkpoint = JobCheckpoints(tmp_path / "run/checkpoints").latest()
    assert checkpoint is not None
    assert checkpoint.step == 20
    mapper = Prefix("model.", mapper_from_hugging_face(config.model).inverse(), output="")
    convert(checkpoint.source, mapper, tmp_path / "converted", waive=["optimizer.*"], copy_from=exported)
    found = {path.name: path.read_bytes() for path in (tmp_path / "converted").iterdir()}
    assert found == {path.name: path.read_bytes() for path in exported.iterdir()}
