"""Case 17: a tied head is its embedding, in memory and in checkpoints, however it is laid out.

That its gradient is the sum of both uses is certified in test_certified_layouts.py.
"""

from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d.ckpt import JobCheckpoints
from d9d.mesh import DistContext, MeshConfig, materialize
from d9d.mesh.testing import run_world
from d9d.models.qwen3_moe import Qwen3MoEConfig, Qwen3MoEForCausalLM, parallelize_qwen3_moe
from d9d.parallel import ShardPolicy

CONFIG = Qwen3MoEConfig(
    vocab_size=11, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, num_experts=2, top_k=1,
    expert_size=4, tie_embeddings=True,
)  # fmt: skip


@attrs.frozen
class Tie:
    names: list[str]
    storages: int
    weight: Tensor


def _tie_of(model: Qwen3MoEForCausalLM) -> Tie:
    """What embedding and head are: names in a state without doubles, how many storages, the weight."""
    both = dict(model.named_parameters(remove_duplicate=False))
    tensors = [both["embedding.weight"], both["head.weight"]]
    storages = {(t.to_local() if isinstance(t, DTensor) else t).untyped_storage().data_ptr() for t in tensors}
    names = [name for name, _ in model.named_parameters() if "layers" not in name]
    return Tie(names, len(storages), tensors[1].full_tensor().detach())


def _built(context: DistContext, seed: int) -> Qwen3MoEForCausalLM:
    with torch.device("meta"):
        model = Qwen3MoEForCausalLM(CONFIG)
    parallelize_qwen3_moe(model, context, policy=ShardPolicy(compute_dtype=None))
    materialize(model, device=context.device, seed=seed)
    return model


def _saved_and_loaded(meshes: list[MeshConfig], root: Path) -> list[tuple[Tie, Tie, Tie]]:
    found = []
    for index, mesh in enumerate(meshes):
        with DistContext.launch(mesh, "cpu") as context:
            saved, loaded = _built(context, 1), _built(context, 2)
            before = _tie_of(loaded)
            checkpoints = JobCheckpoints(root / str(index))
            checkpoints.save(1, dict(saved.named_parameters()), shared={}, per_rank={})
            checkpoints.latest().load(dict(loaded.named_parameters()))
            with torch.no_grad():  # both see what is written to one
                dict(loaded.named_parameters())["embedding.weight"].mul_(2.0)
            found.append((_tie_of(saved), before, _tie_of(loaded)))
    return found


def test_a_tied_head_stays_one_tensor_through_sharding_initialization_and_loading(tmp_path):
    meshes = [MeshConfig(replicate=2), MeshConfig(shard=2), MeshConfig(replicate=2, expert=2)]
    for per_mesh in run_world(2, _saved_and_loaded, meshes, tmp_path):
        for saved, before, loaded in per_mesh:
            for tie in (saved, before, loaded):
                assert tie.names == ["embedding.weight", "norm.weight"]
                assert tie.storages == 1
            assert not torch.equal(before.weight, saved.weight)
            assert torch.equal(loaded.weight, 2 * saved.weight)
