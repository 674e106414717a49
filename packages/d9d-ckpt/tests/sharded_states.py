"""States of DTensors by every placement, and a mapper that makes them of a checkpoint's tensors."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from d9d.ckpt import Concatenate, Identity, Parallel, Rename, Sequential, Stack, Transpose

EXPERTS, INNER, HIDDEN, VOCABULARY = 6, 4, 6, 11
MAPPER = Parallel(
    Rename("model.embed", "embed"),
    Transpose("lm_head", "head"),
    Sequential(
        Concatenate(["experts.{e}.gate", "experts.{e}.up"], "experts.{e}.gate_up", sizes=(INNER, INNER)),
        Stack("experts.{e}.gate_up", "gate_up", count=EXPERTS),
    ),
    Identity("step", "mask", "empty", "few"),
)


def hugging_face_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed": torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16(),
        "lm_head": torch.randn(HIDDEN, VOCABULARY, generator=generator),
        "step": torch.tensor(7),
        "mask": torch.rand(5, generator=generator) > 0.5,
        "empty": torch.zeros(0, 3),
        "few": torch.randn(2, 3, generator=generator),
    }
    for expert in range(EXPERTS):
        for name in ("gate", "up"):
            tensors[f"experts.{expert}.{name}"] = torch.randn(INNER, HIDDEN, generator=generator)
    return tensors


def full_state() -> dict[str, torch.Tensor]:
    return dict(MAPPER.apply(hugging_face_tensors()))


STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
PLACEMENTS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    STRIDED,
    (Replicate(), Shard(1)),
]
TURNS = range(0, len(PLACEMENTS), 2)


def sharded(state, mesh: DeviceMesh, turn: int):
    """Each tensor of two or more dims by another of the placements; others sharded on dim 0, or plain."""
    result = {}
    for index, (name, tensor) in enumerate(sorted(state.items())):
        if tensor.ndim == 0:
            result[name] = tensor.clone()
            continue
        placements = PLACEMENTS[(turn + index) % len(PLACEMENTS)] if tensor.ndim > 1 else (Replicate(), Shard(0))
        result[name] = strided(tensor, mesh) if placements == STRIDED else distribute_tensor(tensor, mesh, placements)
    return result


def strided(tensor, mesh: DeviceMesh) -> DTensor:
    """Dim 0 by the second mesh dim first, within that by the first: as tensor parallelism under FSDP."""
    first, second = mesh.get_coordinate()
    parts = list(tensor.chunk(mesh.size(1)))
    part = parts[second] if second < len(parts) else tensor[:0]
    rows = list(part.chunk(mesh.size(0))) if len(part) else []
    local = rows[first] if first < len(rows) else tensor[:0]
    placements = (_StridedShard(0, split_factor=mesh.size(1)), Shard(0))
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def assert_equal_shards(found, expected):
    for name, tensor in expected.items():
        ours = found[name].to_local() if isinstance(found[name], DTensor) else found[name]
        theirs = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def blank(state):
    return {name: zeros_like(tensor) for name, tensor in state.items()}


def zeros_like(tensor):
    """As torch's, which is slow for a DTensor of a new shape or layout."""
    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor)
    local, mesh = torch.zeros_like(tensor.to_local()), tensor.device_mesh
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def wide_tensors() -> dict[str, torch.Tensor]:
    """Large enough for headers to be next to nothing."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed": (64, 48), "lm_head": (48, 64), "few": (64, 32)}
    shapes |= {f"experts.{e}.{name}": (INNER, 2048) for e in range(EXPERTS) for name in ("gate", "up")}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


WIDE = Parallel(*MAPPER.mappers[:3], Identity("few"))
