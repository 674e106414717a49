"""Checkpoints as a graph of named tensors: stream, transform, reshard."""

from d9d.ckpt._collective import PeerError
from d9d.ckpt._export import export
from d9d.ckpt._job import JobCheckpoints
from d9d.ckpt._job_read import JobCheckpoint
from d9d.ckpt._json import JSON
from d9d.ckpt._load import load
from d9d.ckpt._manifest import UnknownFormatError
from d9d.ckpt._mapper import Group, Mapper
from d9d.ckpt._mappers import (
    Chunk,
    Concatenate,
    Identity,
    Parallel,
    Prefix,
    Rename,
    Sequential,
    Stack,
    Transpose,
    Unstack,
)
from d9d.ckpt._plan import Plan, PlanError, plan
from d9d.ckpt._source import CheckpointError, Source, open_checkpoint
from d9d.ckpt._spec import Region, TensorSpec

__all__ = [  # sorted within groups
    # the state graph
    "Group",
    "Mapper",
    "Plan",
    "PlanError",
    "Region",
    "TensorSpec",
    "plan",
    # leaves
    "Chunk",
    "Concatenate",
    "Identity",
    "Rename",
    "Stack",
    "Transpose",
    "Unstack",
    # composites
    "Parallel",
    "Prefix",
    "Sequential",
    # model checkpoints
    "CheckpointError",
    "Source",
    "export",
    "load",
    "open_checkpoint",
    # job checkpoints
    "JSON",
    "JobCheckpoint",
    "JobCheckpoints",
    "UnknownFormatError",
    # errors of other ranks
    "PeerError",
]
