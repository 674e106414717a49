"""Train a Qwen3-MoE on the source text of Python's standard library, byte by byte.

    uv run examples/qwen3_moe/pretrain.py
    uv run examples/qwen3_moe/pretrain.py --help
    uv run torchrun --nproc-per-node 4 examples/qwen3_moe/pretrain.py --mesh.replicate 4 --mesh.expert 2

Started again with the same directory, it goes on after the last checkpoint.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from order2 import Order2Model
from stdlib_bytes import ByteWindows, collate, read_library
from torch import Tensor, nn

from d9d.ckpt import Mapper, export
from d9d.loop import Metric, Trainer, TrainerConfig, evaluate
from d9d.loop.config import from_command_line
from d9d.mesh import DistContext, MeshConfig
from d9d.models import CausalLMContext, CausalLMOutput
from d9d.models.qwen3_moe import (
    Qwen3MoEConfig,
    Qwen3MoEForCausalLM,
    config_to_hugging_face,
    mapper_from_hugging_face,
    parallelize_qwen3_moe,
)
from d9d.parallel import LossSum, ShardPolicy, StageInfo


@attrs.frozen(kw_only=True)
class PretrainConfig:
    """What this script takes from its config file and its command line."""

    model: Qwen3MoEConfig
    """Sizes of the model; at least 256 tokens."""

    trainer: TrainerConfig
    """The run."""

    mesh: MeshConfig = attrs.field(factory=MeshConfig)
    """Degrees of parallelism."""

    compute_dtype: Literal["bfloat16", "float32"] | None = None
    """Of matrix products when parameters are sharded (mesh.shard); none: that of the parameters (trainer.dtype)."""

    held_out_bytes: int = 200_000
    """About how much text is held out, in whole files."""

    device: Literal["cpu", "cuda"] | None = None
    """Where to train; none: CUDA where there is any."""

    export: bool = True
    """Whether to write the trained model for Hugging Face's transformers, into the directory of the run."""

    compare: bool = True
    """Whether to compare with an order-2 model of bytes; the exit code is 1 if training does not beat it."""

    def __attrs_post_init__(self) -> None:
        """Refuse a model without a token for every byte."""
        if self.model.vocab_size < 256:
            raise ValueError(f"model.vocab_size={self.model.vocab_size!r}: there are 256 bytes, give at least as many")

    @property
    def sequence(self) -> int:
        """Bytes of a sample."""
        return self.trainer.sequence or 256


@attrs.frozen
class Qwen3MoEProvider:
    """How the trainer gets its model."""

    config: Qwen3MoEConfig
    policy: ShardPolicy

    def build(self, stage: StageInfo) -> Qwen3MoEForCausalLM:
        """The whole model, or what a stage of the pipeline holds of it."""
        return Qwen3MoEForCausalLM(self.config, stage)

    def parallelize(self, module: nn.Module, stage: StageInfo, ctx: DistContext) -> None:
        """Experts over ep, the rest on every rank or sharded."""
        del stage
        assert isinstance(module, Qwen3MoEForCausalLM)
        parallelize_qwen3_moe(module, ctx, policy=self.policy)

    def mapper(self, module: nn.Module) -> Mapper:
        """From Hugging Face's names."""
        del module
        return mapper_from_hugging_face(self.config)

    def flops_per_token(self, sequence: int) -> float:
        """For the MFU."""
        return self.config.flops_per_token(sequence)


class NextByte:
    """Predict every byte of a sample from those before it."""

    def inputs(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, CausalLMContext]:
        """Tokens, positions and labels."""
        inputs, labels = batch
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        return inputs, CausalLMContext(position_ids=positions, labels=labels)

    def loss(self, out: CausalLMOutput, shared: CausalLMContext) -> LossSum:
        """Summed cross-entropy."""
        del shared
        assert out.loss is not None
        return out.loss

    def metrics(self) -> Mapping[str, Metric]:
        """Nothing beyond the loss."""
        return {}


def build_trainer(config: PretrainConfig, files: Sequence[bytes], ctx: DistContext) -> Trainer:
    """The trainer of this run, after its last checkpoint if there is one."""
    compute_dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    reduce_dtype = torch.promote_types(getattr(torch, config.trainer.dtype), torch.float32)
    policy = ShardPolicy(compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    return Trainer(
        config.trainer,
        ctx=ctx,
        provider=Qwen3MoEProvider(config.model, policy),
        task=NextByte(),
        dataset=ByteWindows(files, config.sequence),
        collate=partial(collate, sequence=config.sequence),
    )


def bits_per_byte(trainer: Trainer, config: PretrainConfig, files: Sequence[bytes]) -> float:
    """What the model needs on average for a byte of these files."""
    total = evaluate(
        trainer.executor,
        NextByte(),
        ByteWindows(files, config.sequence),
        collate=partial(collate, sequence=config.sequence),
        microbatch=trainer.batches.microbatch,
        ctx=trainer.ctx,
    )
    return total.mean().item() / math.log(2)


def main(config: PretrainConfig) -> bool:
    """Train, compare, export; whether training did as well as was asked."""
    files, held_out_files = read_library(held_out_bytes=config.held_out_bytes)
    with DistContext.launch(config.mesh, config.device) as ctx:
        ctx.configure_logging()
        trainer = build_trainer(config, files, ctx)
        results = {f"at step {trainer.step}": bits_per_byte(trainer, config, held_out_files)}
        trainer.run()
        after = results[f"at step {trainer.step}"] = bits_per_byte(trainer, config, held_out_files)
        if config.export:
            export_hugging_face(trainer, config)
        if config.compare:
            results["order-2 model"] = Order2Model(files).bits_per_byte(held_out_files)
        if ctx.is_main:
            print("bits per byte on held-out files")
            for name, bits in results.items():
                print(f"  {name:<16} {bits:.3f}")
    return not config.compare or after < results["order-2 model"]


def export_hugging_face(trainer: Trainer, config: PretrainConfig) -> None:
    """Write what `transformers.AutoModelForCausalLM.from_pretrained` loads, unless it is there already."""
    directory = config.trainer.directory / f"hugging_face-{trainer.step}"
    if directory.exists():
        return
    hugging_face: dict[str, Any] = config_to_hugging_face(config.model, dtype=config.trainer.dtype)
    export(
        trainer.named_parameters(),
        mapper_from_hugging_face(config.model).inverse(),
        directory,
        extra_files={"config.json": json.dumps(hugging_face, indent=2) + "\n"},
    )


if __name__ == "__main__":
    defaults = Path(__file__).with_name("small.toml")
    sys.exit(0 if main(from_command_line(PretrainConfig, file=defaults)) else 1)
